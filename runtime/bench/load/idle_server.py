"""`stepgraph serve` over a model whose steps compute nothing, on one core.

python -m stepgraph.runtime.bench.load.idle_server demo --mode eager --max-num-seqs 64

All of its CPU time is that of the host: the engine's work per token, and the way to the socket.
"""

from __future__ import annotations

import os
import random
import sys
from functools import partial

from ...config import EngineConfig
from ...engine.engine import Engine
from ...engine.startup import start
from ...service.async_engine import AsyncEngine
from ...service.service_config import ServiceConfig
from ..scenarios.host_overhead import idle_library


def _start(source: str, config: EngineConfig) -> Engine:
    parts = start(source, config, progress=False)
    keys, vocab_size = parts.runner.sizes.keys(), parts.model.config.vocab_size
    parts.runner.library = idle_library(keys, vocab_size, random.Random(config.seed))
    return Engine(parts)


def _make_engine(source: str, config: EngineConfig, service: ServiceConfig) -> AsyncEngine:
    return AsyncEngine(partial(_start, source, config), service)


def _main() -> int:
    from ...service.http.server import main  # needs the extra `server`

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return main(make_engine=_make_engine)


if __name__ == "__main__":
    sys.exit(_main())
