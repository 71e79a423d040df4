"""Sizes of products: by default, and what they were tuned to on this machine's device.

Products of up to four rows serve a decode step, where the time is spent on reading the weight once.
With the default sizes no kernel of the presets spills registers (docs/gpu-predictions.md), but some
over codes with small groups spill 8 to 32 bytes.

Engines look tuned sizes up in a file, read once, and never tune: what is not in the file runs with
`default_config`. The file is written by `python -m stepgraph.runtime.tools.tune`, next to the CPU
kernels in the user's cache (`cache_directory`). An entry holds for one `Product`, one version of
Triton and one source of the kernels; after any of these changed it is found no more, and a newer
one is stored as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton

from ....profiling.atomic_write import write_file
from ..cpu.build import cache_directory
from .kernel_calls import compute_capability, num_multiprocessors
from .linear import EXPERT_PRODUCTS, LinearConfig, code_bits, row_bytes, row_class

logger = logging.getLogger("stepgraph.runtime")

VERSION = 7
"""Of the file's format."""
_MOST_EXPERT_ROWS = 256
"""Experts of steps with more tokens run with the sizes of this many."""


_PREFETCH_BUDGET = 24 << 20
"""Bytes of a weight that are requested into the L2 cache ahead at most: half of an H100's. By
default a larger weight is not prefetched at all; tuning also tries to prefetch this much of it."""


class Product(NamedTuple):
    """What the sizes of a product depend on."""

    kernel: str
    """`norm_linear`, `gate_up`, `residual_linear`, or one of `EXPERT_PRODUCTS`."""
    rows: int
    """T; of experts, tokens. Sizes are tuned for classes of rows."""
    n: int
    """Output features; for gate_up the result's, for experts the rows of one expert's weight."""
    k: int
    """Input features."""
    dtype: torch.dtype
    """Of activations."""
    weight_dtype: torch.dtype
    """Of the weight as stored."""
    device: torch.device
    experts: int = 0
    """Of experts: how many there are."""
    per_token: int = 0
    """Of experts: how many process a token."""
    grouped: bool = False
    """Whether fewer than 128 inputs share a scale, or groups have minimums; not of experts."""

    @property
    def halves(self) -> int:
        """Rows of the weight for each output feature: two of gate_up."""
        return 2 if self.kernel == "gate_up" else 1

    @property
    def feature_bytes(self) -> int:
        """Bytes of the weight for each output feature."""
        return self.halves * row_bytes(self.k, self.weight_dtype)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured to be best."""

    config: LinearConfig
    microseconds: float
    """Of a decode step of a few layers with it; the median."""
    default_microseconds: float
    """The same with the default."""


def _in_class(product: Product) -> Product:
    """Return a product of as many rows as its sizes are tuned for: one of `ROW_CLASSES`, or of
    experts a power of two.

    Raises ValueError for more than four rows of other kernels than `EXPERT_PRODUCTS`.
    """
    if product.kernel in EXPERT_PRODUCTS:
        rows = min(_MOST_EXPERT_ROWS, triton.next_power_of_2(product.rows))
        return product._replace(rows=rows)
    return product._replace(rows=row_class(product.rows))


@cache
def _entry_name(product: Product) -> str:
    """Return the name of an entry of the file: all that its sizes hold for."""
    device = product.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    fields = (*product._replace(device=name), triton.__version__, _source_hash())  # type: ignore[arg-type]
    return " ".join(map(str, fields))


_Choices = Mapping[Product, LinearConfig]
_trial: ContextVar[tuple[_Choices, dict[Product, list[LinearConfig]]] | None]
_trial = ContextVar("configurations on trial, and what was looked up", default=None)


@contextlib.contextmanager
def trial(choices: _Choices) -> Iterator[dict[Product, list[LinearConfig]]]:
    """Use these configurations, and defaults for the rest, in this block; nothing is looked up.

    Yields a dict that gets the candidates of each product that is looked up, the default first.
    """
    asked: dict[Product, list[LinearConfig]] = {}
    token = _trial.set((choices, asked))
    try:
        yield asked
    finally:
        _trial.reset(token)


def lookup(product: Product, candidates: Callable[[], list[LinearConfig]]) -> LinearConfig | None:
    """Return what a product was tuned to, or None; `candidates` are the configurations to try.

    The file is read at the first call and not again: what another process tunes serves later
    processes. Raises ValueError for more than four rows of other kernels than `EXPERT_PRODUCTS`.
    """
    product = _in_class(product)
    if (on_trial := _trial.get()) is not None:
        choices, asked = on_trial
        asked[product] = candidates()
        return choices.get(product)
    tuned = _known(tuning_file()).get(_entry_name(product))
    return None if tuned is None else tuned.config


def best_config(product: Product, *, pending: bool = False) -> LinearConfig:
    """Return what a product of up to four rows was tuned to, or the default.

    `pending`: whether the kernel also adds a pending output of a layer. It needs more registers
    then, and below compute capability 9, where the same kernel takes up to 50 more. Cached, because
    steps that are not captured call this for each launch. Raises ValueError as `lookup`.
    """
    choose = _best_config if _trial.get() is None else _best_config.__wrapped__
    multiprocessors = num_multiprocessors(product.device)
    return choose(product, multiprocessors, pending or compute_capability() < 90)


@cache
def _best_config(product: Product, multiprocessors: int, tight: bool) -> LinearConfig:
    sizes = (product, multiprocessors, tight)
    return lookup(product, lambda: candidate_configs(*sizes)) or default_config(*sizes)


def default_config(product: Product, multiprocessors: int, tight: bool = False) -> LinearConfig:
    """Return the configuration of a product of up to four rows where nothing was tuned.

    A `tight` kernel needs more registers than others of its sizes, see `best_config`.
    """
    rows, halves = row_class(product.rows), product.halves
    n, k, bits = product.n, product.k, code_bits(product.weight_dtype)
    # Four programs to a multiprocessor, each with 16 KiB of weights on their way: in one tile, or
    # in two of half the size where there are more to come. More rows have more sums in registers.
    block_n = 1
    while block_n < 32 and -(-n // block_n) > 4 * multiprocessors:
        block_n *= 2
    width = 65536 // (block_n * halves * max(bits, 8))
    if product.grouped:  # scales take registers too
        width //= max(1, rows // 2)
    elif rows == 1 and k <= 4 * width and (bits > 8 or k <= 2 * width):
        width *= 2
    elif rows == 4 and (halves == 2 or bits <= 8):
        width //= 2
    block_k = 16
    while block_k < k and block_k < width:
        block_k *= 2
    scarce = rows == 4 or (rows == 2 and k % block_k == 0)  # two rows of masked tiles fit
    wide = tight and scarce and block_n * halves >= 32
    num_warps = 8 if wide or product.grouped else 4
    config = LinearConfig(block_n, block_k, num_warps)
    fits = n * product.feature_bytes <= _PREFETCH_BUDGET
    return bounded_prefetch(config, product, _PREFETCH_BUDGET if block_k < k and fits else 0)


def candidate_configs(
    product: Product, multiprocessors: int, tight: bool = False
) -> list[LinearConfig]:
    """Return the configurations to time, the default first.

    They have sizes around the default ones, and prefetch nothing of the weight, a bounded part, or
    all.
    """
    default = default_config(product, multiprocessors, tight)
    configs = [default]
    budgets = (0, _PREFETCH_BUDGET, product.n * product.feature_bytes)
    for size_n, size_k, budget in itertools.product((0.5, 1, 2), (0.5, 1, 2), budgets):
        block_n, block_k = int(default.block_n * size_n), int(default.block_k * size_k)
        for num_warps in (4, 8) if size_n == 1 else (4,):
            config = LinearConfig(block_n, block_k, num_warps)
            if block_n >= 1 and block_k >= 16:
                configs.append(bounded_prefetch(config, product, budget))
    return list(dict.fromkeys(configs))


def bounded_prefetch(config: LinearConfig, product: Product, budget_bytes: int) -> LinearConfig:
    """Return `config` with programs that together prefetch at most `budget_bytes` of the weight.

    They prefetch all of a weight that is not larger.
    """
    share = config.block_n * product.feature_bytes
    if product.n * product.feature_bytes > budget_bytes:
        share = min(share, budget_bytes // -(-product.n // config.block_n))
    return replace(config, prefetch=share - share % product.feature_bytes)


def store(results: Mapping[Product, Tuned]) -> Path:
    """Put results into the file, in place of what it has for these products; return where it is.

    No process reads half a file. A file that cannot be read is replaced.
    """
    path = tuning_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {_entry_name(_in_class(product)): tuned for product, tuned in results.items()}
    entries = {name: dataclasses.asdict(one) for name, one in {**_read(path), **found}.items()}
    write_file(path, json.dumps({"version": VERSION, "entries": entries}, indent=1))
    _known.cache_clear()
    _best_config.cache_clear()
    return path


def tuning_file() -> Path:
    """Return where the file is, or would be."""
    return cache_directory() / "tuned_linear.json"


@cache
def _known(path: Path) -> Mapping[str, Tuned]:
    return MappingProxyType(_read(path))


def _read(path: Path) -> dict[str, Tuned]:
    """The entries of the file; none, and a warning, if they cannot be understood."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise ValueError(f"its version is {document['version']!r}, not {VERSION}")
        return {name: _tuned(**entry) for name, entry in document["entries"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning(
            "%s is ignored, kernels run with their defaults: %s: %s (delete it to tune again)",
            *(path, type(error).__name__, error),
        )
        return {}


def _tuned(config: dict[str, Any], **times: Any) -> Tuned:
    """Return an entry of the file. Raises ValueError or TypeError if it is none."""
    return Tuned(LinearConfig(**config), **{name: float(time) for name, time in times.items()})


@cache
def _source_hash() -> str:
    """Of all that the machine code of kernels is made from, and their sizes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
