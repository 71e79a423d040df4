"""Tasks are done once, by the thread or by its owner."""

from __future__ import annotations

import threading
from collections import Counter

from stepgraph.runtime.execution.token_masks import HelperThread


def test_every_task_is_done_once() -> None:
    helper: HelperThread[int] = HelperThread("helper")
    done: Counter[int] = Counter()
    for first in range(0, 4000, 8):
        helper.begin(lambda task: done.update([task]), range(first, first + 8))
        helper.finish()
        assert len(done) == first + 8
    assert set(done.values()) == {1}
    helper.close()
    helper.finish()


def test_the_owner_does_what_the_thread_has_not_begun() -> None:
    helper: HelperThread[int] = HelperThread("helper")
    go_on, began = threading.Event(), threading.Event()
    by: dict[int, str] = {}

    def do(task: int) -> None:
        by[task] = threading.current_thread().name
        if by[task] == "helper":
            began.set()
            go_on.wait(60)
        elif task == 3:
            go_on.set()

    helper.begin(do, range(4))
    assert began.wait(60)
    helper.finish()
    assert by.pop(0) == "helper"
    assert set(by.values()) == {threading.current_thread().name}
    assert len(by) == 3
    helper.close()
