import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stepgraph.profiling import ranges

names = st.sampled_from(sorted(ranges.RANGES))


class Recorder:
    """An NVTX domain that writes down what a tool would see."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, int, str]] = []
        self.events: list[tuple[str, str, int] | tuple[str]] = []

    def get_event_attributes(self, message: str, color: int, category: str) -> SimpleNamespace:
        self.registered.append((message, color, category))
        return SimpleNamespace(message=message, payload=None)

    def push_range(self, attributes: SimpleNamespace) -> None:
        assert type(attributes.payload) is int
        self.events.append(("push", attributes.message, attributes.payload))

    def pop_range(self) -> None:
        self.events.append(("pop",))


class EmitterAgainstStack(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.emitter = ranges.connect(self.recorder)
        self.stack: list[tuple[str, int]] = []

    @rule(name=names, payload=st.integers(0, 2**40))
    def push(self, name: str, payload: int) -> None:
        self.emitter.push(name, payload)
        self.stack.append((name, payload))

    @precondition(lambda self: self.stack)
    @rule()
    def pop(self) -> None:
        self.emitter.pop()
        self.stack.pop()

    @rule(name=names, payload=st.integers(0, 2**40), fails=st.booleans())
    def span(self, name: str, payload: int, fails: bool) -> None:
        try:
            with self.emitter.span(name, payload):
                assert self.open() == [*self.stack, (name, payload)]
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails

    def open(self) -> list[tuple[str, int]]:
        stack: list[tuple[str, int]] = []
        for kind, *event in self.recorder.events:
            if kind == "push":
                stack.append((event[0], event[1]))
            else:
                stack.pop()
        return stack

    @invariant()
    def a_tool_sees_the_same_open_ranges(self) -> None:
        assert self.open() == self.stack

    @invariant()
    def every_message_is_registered_once(self) -> None:
        assert len(self.recorder.registered) == len(ranges.RANGES)


TestEmitterAgainstStack = EmitterAgainstStack.TestCase


def test_the_dictionary_is_complete_and_sound() -> None:
    assert set(ranges.RANGES) == {
        "step", "plan", "launch", "prepare", "copy", "replay", "prefill", "commit", "capture",
        "load", "warmup", "swap", "fork",
    }  # fmt: skip
    for name, info in ranges.RANGES.items():
        assert info.name == name
        assert name.isalpha(), "a name holds no id"
        assert info.description
        assert info.payload
        assert 0xFF000000 <= info.color <= 0xFFFFFFFF, "opaque ARGB"
        seen = {name}
        while info.parent is not None:
            assert info.parent in ranges.RANGES
            assert info.parent not in seen
            seen.add(info.parent)
            info = ranges.RANGES[info.parent]
    with pytest.raises(TypeError):
        ranges.RANGES["step"] = ranges.RANGES["plan"]  # type: ignore[index]


def test_every_range_is_registered_with_its_color_and_category() -> None:
    recorder = Recorder()
    ranges.connect(recorder)
    assert recorder.registered == [(i.name, i.color, i.category) for i in ranges.RANGES.values()]


@pytest.mark.parametrize("emitter", [ranges.connect(None), ranges.connect(Recorder()), ranges])
@given(name=st.text().filter(lambda text: text not in ranges.RANGES))
def test_an_unknown_name_fails_whether_or_not_a_tool_listens(emitter, name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown range .*the ranges are: step, plan"):
        emitter.push(name, 1)
    with pytest.raises(ValueError, match="unknown range"):
        emitter.span(name)


def test_integers_of_numpy_arrive_as_integers() -> None:
    recorder = Recorder()
    emitter = ranges.connect(recorder)
    with emitter.span(ranges.REPLAY, np.int32(7)):  # type: ignore[arg-type]
        emitter.push(ranges.COPY, True)
        emitter.pop()
    assert recorder.events == [("push", "replay", 7), ("push", "copy", 1), ("pop",), ("pop",)]


def test_threads_do_not_share_event_attributes() -> None:
    """Setting a payload and pushing are two calls: a shared object would mix two engines up."""
    seen: dict[str, set[int]] = {}

    class PerThread(Recorder):
        def push_range(self, attributes: SimpleNamespace) -> None:
            seen.setdefault(threading.current_thread().name, set()).add(id(attributes))

    emitter = ranges.connect(PerThread())
    barrier = threading.Barrier(2)

    def work() -> None:
        for _ in range(3):
            emitter.push(ranges.STEP, 1)
        barrier.wait(timeout=10)

    threads = [threading.Thread(target=work, name=name) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen["a"]) == len(seen["b"]) == 1
    assert seen["a"].isdisjoint(seen["b"])


def test_without_a_tool_nothing_is_emitted_and_spans_pass_exceptions_on() -> None:
    emitter = ranges.connect(None)
    with emitter.span(ranges.STEP, 1) as outer, emitter.span(ranges.PLAN) as inner:
        assert outer is inner is None
    with pytest.raises(RuntimeError, match="passes"), emitter.span(ranges.STEP):
        raise RuntimeError("passes")


# The smallest tool that NVTX accepts: it is asked to put its functions into the tables of the
# process and prints what arrives. Layouts as in the headers of NVTX 3.
TOOL = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef void (*fn)(void);
typedef struct { size_t size; int (*table)(int, fn ***, unsigned *); } callbacks;
typedef struct {
  uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color;
  int32_t payload_type, reserved; int64_t payload; int32_t message_type; const char *message;
} event;
static void *create(const char *name) { printf("domain %s\n", name); return (void *)1; }
static const char *reg(void *d, const char *s) { printf("register %s\n", s); return s; }
static int push(void *d, const event *e) {
  printf("push %s %lld\n", e->message, (long long)e->payload); return 0;
}
static int pop(void *d) { printf("pop\n"); fflush(stdout); return 0; }
int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
  const callbacks *c = export(1); fn **t; unsigned n;
  if (!c->table(5, &t, &n)) return 0;
  *t[4] = (fn)push; *t[5] = (fn)pop; *t[10] = (fn)reg; *t[12] = (fn)create;
  return 1;
}
"""

PROGRAM = """
from stepgraph.profiling import ranges
print("attached", ranges.attached, flush=True)
with ranges.span(ranges.STEP, 41):
    ranges.push(ranges.REPLAY, 8)
    ranges.pop()
    ranges.push(ranges.REPLAY, 9)
    ranges.pop()
"""


def run(**environment: str) -> list[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NVTX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux" or sys.maxsize < 2**32:
        pytest.skip("building an NVTX tool needs a C compiler on 64-bit Linux")
    folder: Path = tmp_path_factory.mktemp("nvtx_tool")
    (folder / "tool.c").write_text(TOOL)
    library = str(folder / "tool.so")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, str(folder / "tool.c")], check=True
    )
    return library


def test_a_real_tool_receives_names_payloads_and_pairs(tool: str) -> None:
    lines = run(NVTX_INJECTION64_PATH=tool)
    assert "domain stepgraph" in lines
    assert "attached True" in lines
    registered = [line for line in lines if line.startswith("register ")]
    assert sorted(registered) == sorted(f"register {name}" for name in ranges.RANGES)
    assert [line for line in lines if line.startswith(("push", "pop"))] == [
        "push step 41",
        "push replay 8",
        "pop",
        "push replay 9",
        "pop",
        "pop",
    ]


def test_a_tool_can_be_kept_out(tool: str) -> None:
    assert run(NVTX_INJECTION64_PATH=tool, NVTX_DISABLE="1")[-1] == "attached False"


def test_no_tool_no_emission() -> None:
    assert run() == ["attached False"]
