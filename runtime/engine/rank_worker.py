"""The process of a rank above 0: `python -m stepgraph.runtime.engine.rank_worker`.

Rank 0 starts it with the place of the shared segment; everything else comes through that. It ends
when rank 0 closes its engine, or with status 1 when the group fails or rank 0 has died.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from functools import partial

from ..distributed.rank_group import RankGroup
from ..distributed.rank_processes import GROUP_ENDED
from ..distributed.segment import SharedSegment, open_shared
from ..errors import RankError
from .rank_start import agree_on_task, decoded_config, encoded_task, of_rank
from .startup import follow, resolved_source

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Join the group of a parent process and follow it.

    Args:
        arguments: process and descriptor of the segment, rank, number of ranks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: rank 0 decides
    process, descriptor, rank, ranks = map(int, arguments)
    memory = open_shared(process, descriptor, SharedSegment.nbytes_for(ranks))
    group = RankGroup(memory, rank, ranks)
    group.watch.on_abort = partial(_exit, GROUP_ENDED)
    try:
        task = group.exchange(None)[0]
        config = decoded_config(task)
        found, resolved = resolved_source(task["source"], config)
        agree_on_task(group, encoded_task(found, resolved))
        follow(*of_rank(found, resolved, group), group)
    except BaseException as error:
        if not isinstance(error, RankError):
            traceback.print_exc()
        group.fail(error)
        _exit(GROUP_ENDED)
    group.close()
    _exit(0)


def _exit(status: int) -> None:
    """End this process at once, whatever its threads and the device do."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the pipe is closed: rank 0 has died
        pass
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
