"""Fixtures of all tests: tiny models, engines on them, and quiet libraries."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which others below do
    from .rigs.triton_interpreter import install

    install()

import hypothesis
import transformers
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.kernels import have_compiler, load_cpu_ops
from stepgraph.runtime.kernels.weights import WeightStorage
from transformers import GenerationConfig

from .rigs.tiny_models import (
    BASE,
    EOS_TOKEN_IDS,
    VARIANTS,
    TinyModel,
    byte_level_tokenizer,
    random_model,
)

# No deadline: a busy machine is no fault of an example. The examples of a test change with its
# code only, so that a failure belongs to the change; --hypothesis-profile=random draws others.
hypothesis.settings.register_profile("random", deadline=None, max_examples=50)
hypothesis.settings.register_profile(
    "stepgraph", hypothesis.settings.get_profile("random"), derandomize=True
)
hypothesis.settings.load_profile("stepgraph")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background ignores SIGINT, which the tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

WITHOUT_NATIVE_LAYERS = ("deepseek", "kimi", "falcon_h1", "nemotron")
"""Beginnings of the names of variants whose layers have no C++ version."""

GPU_BLOCKS = 2048
"""More than any test's rows use, and a few MiB of a tiny model."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    counts: Counter[str] = Counter()
    without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)
        if (sampled := item.get_closest_marker("sampled")) is not None:
            function = item.nodeid.partition("[")[0]
            if counts[function] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[function] += 1


def pytest_make_parametrize_id(val: object) -> str | None:
    return val.name if isinstance(val, WeightStorage) else None


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup() -> None:
    """Random numbers of a test are the same in every order of tests."""
    torch.manual_seed(0)
    random.seed(0)


def pytest_collection_finish() -> None:
    """Keep what was imported out of the later collections of Python's garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quiet_and_single_threaded() -> Iterator[None]:
    """Tiny tensors lose time in every thread beyond the first, and more on a busy machine."""
    threads, asked = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # which engines respect
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    if asked is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = asked


@pytest.fixture(autouse=True)
def untuned(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are of default sizes, whatever the user tuned, and what a test tunes is its own."""
    if importlib.util.find_spec("triton") is None:
        return
    from stepgraph.runtime.kernels.triton import tuning

    # Most tests ask for no directory, and thousands of them take seconds.
    make = functools.cache(lambda: tmp_path_factory.mktemp("tuned") / "stepgraph")
    one_at_a_time = threading.Lock()  # `cache` lets two threads make one each

    def directory() -> Path:
        with one_at_a_time:
            return make()

    monkeypatch.setattr(tuning, "cache_directory", directory)
    for name in ("_known", "_best_config"):
        unused = functools.cache(getattr(tuning, name).__wrapped__)
        monkeypatch.setattr(tuning, name, unused)


@pytest.fixture(scope="module")
def no_tracebacks() -> Iterator[None]:
    """Nothing is logged by tests that make hundreds of steps fail."""
    logger = logging.getLogger("stepgraph.runtime")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What `torch.empty` returns is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def cpu_ops() -> None:
    """The operators in C++ are loaded; without a compiler there are none."""
    if not have_compiler():
        pytest.skip("needs a C++ compiler")
    load_cpu_ops()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return the model of a variant, written to disk when it is first asked for."""
    made: dict[str, TinyModel] = {}

    def make(variant: str) -> TinyModel:
        if variant not in made:
            settings = BASE | VARIANTS[variant]
            saved = {
                "max_shard_size": settings.pop("max_shard_size", "1GB"),
                "save_original_format": settings.pop("save_original_format", True),
            }
            model = random_model(settings)
            model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_IDS)
            directory = tmp_path_factory.mktemp(variant)
            model.save_pretrained(directory, **saved)
            if variant == "text":
                tokenizer = byte_level_tokenizer(model.config.vocab_size)
                tokenizer.save(str(directory / "tokenizer.json"))
            made[variant] = TinyModel(directory, model)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def base(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("base")


@pytest.fixture
def open_engine(
    tiny: Callable[[str], TinyModel], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Engine]]:
    """Open an engine on a variant or a directory for one test: eager on the CPU by default.

    On a GPU its cache has a fixed size, because tests of several processes share the memory.
    """
    engines: list[Engine] = []
    native = request.node.get_closest_marker("native_kernels") is not None and have_compiler()

    def make(variant: str | Path, **config: Any) -> Engine:
        settings = {"device": "cpu", "mode": "eager", "max_num_seqs": 4} | config
        if settings["device"] != "cpu" and not settings.keys() & {"memory_tokens", "memory_bytes"}:
            settings.setdefault("num_blocks", GPU_BLOCKS)
        if native and (settings["device"], settings["mode"]) == ("cpu", "eager"):
            lacking = str(variant).startswith(WITHOUT_NATIVE_LAYERS)
            settings.setdefault("kernels", "auto" if lacking else "native")
        source = variant if isinstance(variant, Path) else tiny(variant).directory
        engines.append(Engine.from_pretrained(source, EngineConfig(**settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def compiled(tiny: Callable[[str], TinyModel]) -> Iterator[Callable[[str], Engine]]:
    """Return the compiled engine of a variant, shared by all tests: compiling takes seconds.

    A test leaves it idle. Blocks of 8, at most 4 rows, chunks of 24: sizes that differ from
    each other and from the number of blocks of a row, because equal ones are compiled once more.
    """
    engines: dict[str, Engine] = {}

    def make(variant: str) -> Engine:
        if variant not in engines:
            config = EngineConfig(
                device="cpu", mode="compile", max_num_seqs=4, block_size=8, prefill_chunk=24
            )
            engines[variant] = Engine.from_pretrained(tiny(variant).directory, config)
        assert not engines[variant].has_unfinished()
        return engines[variant]

    yield make
    for engine in engines.values():
        assert engine.stats()["fallbacks"] == 0
        engine.check_integrity()
        engine.close()
