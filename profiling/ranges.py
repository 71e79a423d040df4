"""The NVTX ranges, marks and counters of stepgraph, and who else hears of them.

    with ranges.span(ranges.PLAN, step):
        ...

    with ranges.step_span(ranges.REPLAY, step, rows, bucket, tokens, blocks_in_use, padding):
        ...

    ranges.mark(ranges.FALLBACK, bucket)

`RANGES` and `MARKS` are the whole dictionary (see `dictionary.py`). A profiler keeps every message
it has seen for ever, so a name never holds an id: which step, how many rows, which bucket and how
many tokens travel in the payload. One integer is enough for most ranges, because ranges nest (the
`step` around a `copy` says which step it was), and a scalar lands in a column of its own in the
profiler's export. What runs on the device, `replay` and `prefill`, carries all numbers of its step.

Free when nobody listens: NVTX looks for a tool once in a process, at the first use of a domain, and
a tool such as nsys is in place before Python starts. So it is asked once, when this module is
imported. Without a tool the functions only check the name.

`span`, `step_span` and `mark` are attributes of this module that `listening` exchanges: use them as
such (`ranges.span`), so that a listener put in place later hears of them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from .dictionary import (
    CAPTURE,
    COLLECTION,
    COMMIT,
    COPY,
    DOMAIN,
    FALLBACK,
    FORK,
    LAUNCH,
    LOAD,
    MARKS,
    PLAN,
    PREFILL,
    PREPARE,
    RANGES,
    REPLAY,
    STEP,
    SWAP,
    WARMUP,
    WINDOW,
)
from .emitters import Emitter, Guarded, Listener, Payload, StepNumbers, emitter_to
from .nvtx_tool import NvtxDomain, NvtxTool, attached_domain

__all__ = [
    "CAPTURE",
    "COLLECTION",
    "COMMIT",
    "COPY",
    "DOMAIN",
    "FALLBACK",
    "FORK",
    "LAUNCH",
    "LOAD",
    "MARKS",
    "PLAN",
    "PREFILL",
    "PREPARE",
    "RANGES",
    "REPLAY",
    "STEP",
    "SWAP",
    "WARMUP",
    "WINDOW",
    "Emitter",
    "Listener",
    "Payload",
    "StepNumbers",
    "attached",
    "connect",
    "listening",
    "mark",
    "span",
    "step_span",
]


def connect(domain: NvtxDomain | None) -> Emitter:
    """Return an emitter into `domain`, or one that does nothing where `domain` is None."""
    return emitter_to([] if domain is None else [NvtxTool(domain)])


_domain: Final = attached_domain()
_heard_by_all: list[Listener] = [] if _domain is None else [NvtxTool(_domain)]
_exchange: Final = threading.Lock()

attached: Final = _domain is not None
"""Whether a tool takes in the ranges of this process."""

_emitter = emitter_to(_heard_by_all)
span = _emitter.span
step_span = _emitter.step_span
mark = _emitter.mark


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a further listener hear all ranges and marks of the process, of every thread.

    Beside the tool, if there is one, and beside other listeners; when it ends, what anybody else
    hears is as if it had never been there. Ranges that began before it are not told; of those that
    began in it the end is told too, behind its own. A listener that raises breaks nothing: that is
    logged, and it hears no more.
    """
    guarded = Guarded(listener)
    _exchange_listeners(lambda: _heard_by_all.append(guarded))
    try:
        yield
    finally:
        _exchange_listeners(lambda: _heard_by_all.remove(guarded))


def _exchange_listeners(change: Callable[[], None]) -> None:
    """Change who hears, and let the functions of this module go there."""
    global span, step_span, mark
    with _exchange:
        change()
        emitter = emitter_to(_heard_by_all)
        span, step_span, mark = emitter.span, emitter.step_span, emitter.mark
