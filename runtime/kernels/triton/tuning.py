"""What linear layers and experts were tuned to on this machine's device: a file, read once.

Engines look up and never tune: what is not in the file runs with `default_config`. The file is
written by `python -m stepgraph.runtime.tools.tune`, next to the CPU kernels in the user's
cache (`cache_directory`). An entry holds for one kernel, one shape of its weight, one class of
rows, one pair of dtypes, one device, one version of Triton and one source of the kernels; after any
of these changed it is found no more, and a newer one is stored as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton

from ....profiling.atomic_write import write_file
from ..cpu.build import cache_directory
from .kernel_calls import compute_capability, num_multiprocessors
from .linear import (
    EXPERT_PRODUCTS,
    LinearConfig,
    ProductSizes,
    candidate_configs,
    default_config,
    row_class,
)

__all__ = [
    "MOST_EXPERT_ROWS",
    "Tuned",
    "TuningKey",
    "best_config",
    "is_tight",
    "lookup",
    "store",
    "trial",
    "tuning_file",
    "tuning_key",
]

logger = logging.getLogger("stepgraph.runtime")

VERSION = 6
"""Of the file's format."""

SOURCES = (
    "expert_blocks.py",
    "expert_routing.py",
    "experts.py",
    "linear_kernels.py",
    "quantised.py",
    "rowwise.py",
)
"""What the machine code of the kernels is made from."""


MOST_EXPERT_ROWS = 256
"""Steps of more tokens run with the sizes of this many."""


@dataclass(frozen=True, slots=True)
class TuningKey:
    """What a choice holds for."""

    kernel: str
    """`norm_linear`, `gate_up`, `residual_linear`, or one of `EXPERT_PRODUCTS`."""
    rows: int
    """One of `ROW_CLASSES`; of experts, a power of two up to `MOST_EXPERT_ROWS`."""
    n: int
    """Output features; for gate_up the result's, for experts the rows of one expert's weight."""
    k: int
    """Input features."""
    dtype: str
    """Of activations, as torch names it: `bfloat16`."""
    weight_dtype: str
    """Of the weight as stored: `bfloat16`, `int8`, `float8_e4m3fn`."""
    device: str
    """Its name."""
    triton: str
    """Its version."""
    source: str
    """Hash of the kernels' source."""
    experts: int = 0
    """Of experts: how many there are."""
    per_token: int = 0
    """Of experts: how many process a token."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured to be best."""

    config: LinearConfig
    microseconds: float
    """Of a decode step of a few layers with it; the median."""
    default_microseconds: float
    """The same with the default."""


def tuning_key(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    *,
    experts: int = 0,
    per_token: int = 0,
) -> TuningKey:
    """Return the key of a kernel as it would run here.

    Arguments as in `TuningKey`; of `EXPERT_PRODUCTS` rows are tokens. Raises ValueError for more
    than four rows of other kernels.
    """
    by_token = kernel in EXPERT_PRODUCTS
    return TuningKey(
        kernel=kernel,
        rows=min(MOST_EXPERT_ROWS, triton.next_power_of_2(rows)) if by_token else row_class(rows),
        n=n,
        k=k,
        dtype=str(dtype).removeprefix("torch."),
        weight_dtype=str(weight_dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        triton=triton.__version__,
        source=_source_hash(),
        experts=experts,
        per_token=per_token,
    )


_Candidates = Callable[[], list[LinearConfig]]
_Shape = tuple[str, int, int, int, torch.dtype, torch.dtype, torch.device]
"""The first arguments of `tuning_key`."""


class _Trial(NamedTuple):
    choices: Mapping[TuningKey, LinearConfig]
    asked: dict[TuningKey, list[LinearConfig]]


_trial: ContextVar[_Trial | None] = ContextVar("configurations on trial", default=None)


@contextlib.contextmanager
def trial(
    choices: Mapping[TuningKey, LinearConfig],
) -> Iterator[dict[TuningKey, list[LinearConfig]]]:
    """Use these configurations, and defaults for the rest, in this block; nothing is looked up.

    Yields a dict that gets the candidates of each product that is looked up, the default first.
    """
    asked: dict[TuningKey, list[LinearConfig]] = {}
    token = _trial.set(_Trial(choices, asked))
    try:
        yield asked
    finally:
        _trial.reset(token)


def lookup(key: TuningKey, candidates: _Candidates) -> LinearConfig | None:
    """Return what was tuned for `key`, or None; `candidates` are the configurations to try.

    The file is read at the first call and not again: what another process tunes serves later
    processes.
    """
    if (on_trial := _trial.get()) is not None:
        on_trial.asked[key] = candidates()
        return on_trial.choices.get(key)
    tuned = _known(tuning_file()).get(key)
    return None if tuned is None else tuned.config


def best_config(
    kernel: str,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    *,
    pending: bool = False,
) -> LinearConfig:
    """Return what was tuned, or the default; arguments and errors as for `tuning_key`.

    `pending`: whether the kernel also adds a pending output of a layer. Cached, because steps that
    are not captured call this for each launch.
    """
    shape = (kernel, rows, n, k, dtype, weight_dtype, device)
    choose = _best_config if _trial.get() is None else _best_config.__wrapped__
    return choose(shape, num_multiprocessors(device), is_tight(pending))


@cache
def _best_config(shape: _Shape, multiprocessors: int, tight: bool) -> LinearConfig:
    weight_dtype = shape[5]
    sizes = ProductSizes(*shape[:4], weight_dtype.itemsize, multiprocessors, tight)
    tuned = lookup(tuning_key(*shape), lambda: candidate_configs(sizes))
    return tuned or default_config(sizes)


def is_tight(pending: bool) -> bool:
    """Return whether a kernel of the current device needs more registers than its sizes say.

    It does where something `pending` is added and normed, and below compute capability 9: compiled
    for these devices the same kernel takes up to 50 registers more.
    """
    return pending or compute_capability() < 90


def store(results: Mapping[TuningKey, Tuned]) -> Path:
    """Put results into the file, in place of what it has for these keys; return where it is.

    No process reads half a file. A file that cannot be read is replaced.
    """
    path = tuning_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {**_read(path), **results}
    document = {
        "version": VERSION,
        "entries": [
            {**dataclasses.asdict(key), **dataclasses.asdict(tuned)}
            for key, tuned in entries.items()
        ],
    }
    write_file(path, json.dumps(document, indent=1))
    _known.cache_clear()
    _best_config.cache_clear()
    return path


def tuning_file() -> Path:
    """Return where the file is, or would be."""
    return cache_directory() / "tuned_linear.json"


@cache
def _known(path: Path) -> Mapping[TuningKey, Tuned]:
    return MappingProxyType(_read(path))


def _read(path: Path) -> dict[TuningKey, Tuned]:
    """The entries of the file; none, and a warning, if they cannot be understood."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise ValueError(f"its version is {document['version']!r}, not {VERSION}")
        return dict(_entry(entry) for entry in document["entries"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:  # JSON's errors are ValueErrors
        logger.warning(
            "%s is ignored, kernels run with their defaults: %s: %s (delete it to tune again)",
            path,
            type(error).__name__,
            error,
        )
        return {}


def _entry(entry: dict[str, Any]) -> tuple[TuningKey, Tuned]:
    """One entry of the file. Raises ValueError, KeyError or TypeError if it is none."""
    key = {field.name: entry[field.name] for field in dataclasses.fields(TuningKey)}
    times = (float(entry[name]) for name in ("microseconds", "default_microseconds"))
    return TuningKey(**key), Tuned(LinearConfig(**entry["config"]), *times)


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]
