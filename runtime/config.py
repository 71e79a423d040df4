"""EngineConfig: what a user may choose, and how choices left open are made. Nothing is mutated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, cast

import torch

from ..cache.arena import SCALE_BYTES, Storage
from ..cache.memory import MemoryBudget
from .errors import ConfigError
from .kernels import (
    KernelChoice,
    Mode,
    WeightStorage,
    have_compiler,
    have_triton,
    native_obstacle,
)
from .models.config import ModelConfig

__all__ = [
    "EngineConfig",
    "Mode",
    "ResolvedConfig",
    "max_prefill_rows",
    "resolve_device",
    "resolve_kernels",
]

logger = logging.getLogger("stepgraph.runtime")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_BUDGETS = ("memory_fraction", "memory_bytes", "memory_tokens")
MAX_ROWS = 4096
MAX_BLOCK_SIZE = 1024
MAX_STEPS_PER_LAUNCH = 64
MAX_SEED = 2**63 - 1

DEFAULT_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.5}
"""Of the free memory; less where the operating system and others need it too."""


def max_prefill_rows(max_rows: int) -> int:
    """Return how many prompts one prefill step may have chunks of.

    Its sampler computes logits for so many rows, whether they are used or not.
    """
    return min(8, max_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs. Every field has a default that serves; None means "chosen for you".

    Raises `ConfigError` on construction for values that no model and no device can make right.
    """

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1` …; `auto` takes CUDA where there is a device."""
    dtype: str = "auto"
    """Of weights and activations: `float32`, `bfloat16`, `float16`; `auto`: as stored."""
    weight_dtype: str = "auto"
    """Of the weights of linear layers and embeddings: `int8`, a scale for each output channel;
    `fp8` (e4m3), a scale for every 128 inputs of a channel; `auto`: as `dtype`."""
    kv_dtype: str = "auto"
    """Of the cache: `int8` or `fp8` (e4m3), a scale for each token and head; `auto`: as `dtype`."""
    kernels: str = "auto"
    """What runs the operations of a step. `native`: the C++ operators on a CPU, the Triton kernels
    on CUDA; raises where one is missing or fails its check at start. `torch`: plain PyTorch around
    the paged attention operation. `auto`: `native`, and `torch` for operations without a native
    kernel or whose kernel fails its check; `torch` with `mode="eager"`. See docs/kernels.md."""
    mode: str = "auto"
    """`eager`: steps run as they are. `compile`: steps are prepared at start, and those without
    native kernels are compiled whole by `torch.compile`. `graph`: the same, captured as CUDA
    graphs. `auto`: the fastest that the device has."""
    compile: bool = True
    """With `mode="graph"` and without native layers: whether steps are compiled by `torch.compile`
    before they are captured."""
    dependent_launch: bool = True
    """Whether Triton kernels may begin while their predecessors still run (programmatic dependent
    launch, compute capability 9.0). It is switched off where the self-test at start finds that it
    changes a result."""
    block_size: int = 16
    """Tokens a block holds."""
    num_blocks: int | None = None
    """Blocks of the cache, the null block included. Beside one of the `memory_*` fields the batch
    tokens are what the budget leaves."""
    memory_fraction: float | None = None
    """Share of the free memory that the engine may use: 0.9 on CUDA and 0.5 on a CPU where no
    budget is given. The cache takes no more of it than `max_rows` requests of `max_model_len`
    tokens can use; `num_blocks`, `memory_tokens` or `memory_bytes` keep more as prefix cache."""
    memory_bytes: int | None = None
    """Bytes that the engine uses on CUDA; on a CPU a limit, as `memory_fraction` is."""
    memory_tokens: int | None = None
    """Tokens of context that the cache must hold."""
    max_batch_tokens: int | None = None
    """Tokens of one step at most, decoding rows and prefill chunk together."""
    max_rows: int = 16
    """Requests that decode together at most."""
    prefix_cache: bool = True
    """Whether requests that begin alike share what is in the cache of their beginning."""
    host_cache_bytes: int = 0
    """Host memory (pinned for CUDA) that requests are swapped to when blocks run out; 0: none."""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    """When blocks run out: `swap` a request to the host cache, `recompute` it later, or (`auto`)
    what takes less time by the measured speed of copies and of prefill."""
    max_model_len: int | None = None
    """Tokens of one sequence at most, prompt and output; None: what model and cache allow."""
    prefill_chunk: int = 512
    """Prompt tokens of one step at most: bounds how long a prefill can delay a decode step."""
    max_itl_ms: float | None = None
    """Milliseconds between two tokens that prefill may stretch a decode step to: chunks are as
    large as the measured speed of steps allows, up to `prefill_chunk`. Steps are timed at start for
    it. Progress goes first: the smallest prefill step runs even if it does not fit. None: every
    chunk is as large as `prefill_chunk` allows."""
    steps_per_launch: int = 1
    """Decode steps that one launch runs one after the other, where nothing stands against it (see
    `Scheduler`): the host works once for so many tokens of each row, which arrive together. More
    tokens per second where the host is what decoding waits for, as with small models, and offline:
    a token, and whoever comes meanwhile, waits for the whole launch, and what a launch computes of
    a row behind its end is lost."""
    freeze_gc: bool = False
    """Whether Python's collector leaves alone whatever exists once the engine is ready
    (`gc.freeze`), for the whole process and for good: see `docs/benchmarking.md`."""
    buckets: tuple[int, ...] | None = None
    """Numbers of rows to prepare decode steps for; `max_rows` is always one of them."""
    prompt_embeds: bool = False
    """Whether prompts may have embeddings in the place of tokens; every prefill step then reads a
    buffer of `prefill_chunk` embeddings."""
    encoder_cache_bytes: int = 0
    """Host memory for what `Engine.encode` got from encoders, beside the memory plan; 0: nothing is
    kept."""
    tie_word_embeddings: bool | None = None
    """Whether the output head is the embedding: True ignores an `lm_head.weight` of the checkpoint,
    False uses it; None: as in `config.json`, and a checkpoint whose own head differs from the
    embedding it is tied to is refused."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own, and the weights of presets."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a name such as 'cpu' or 'cuda', not {self.device!r}")
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("weight_dtype", self.weight_dtype, ("auto", "int8", "fp8"))
        _check_choice("kv_dtype", self.kv_dtype, ("auto", "int8", "fp8"))
        _check_choice("kernels", self.kernels, ("auto", "native", "torch"))
        _check_choice("mode", self.mode, ("auto", "eager", "compile", "graph"))
        _check_choice("preemption", self.preemption, ("auto", "swap", "recompute"))
        _check_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_int("max_rows", self.max_rows, 1, MAX_ROWS)
        _check_int("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        _check_int("steps_per_launch", self.steps_per_launch, 1, MAX_STEPS_PER_LAUNCH)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("host_cache_bytes", self.host_cache_bytes, 0, 1 << 60)
        _check_int("encoder_cache_bytes", self.encoder_cache_bytes, 0, 1 << 60)
        for field, low, high in (
            ("num_blocks", 2, 1 << 40),
            ("memory_bytes", 1, 1 << 60),
            ("memory_tokens", 1, 1 << 50),
            ("max_batch_tokens", 1, 1 << 20),
            ("max_model_len", 1, 1 << 40),
        ):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), low, high)
        for field in ("compile", "dependent_launch", "prefix_cache", "prompt_embeds", "freeze_gc"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} must be True or False, not {getattr(self, field)!r}")
        if not isinstance(self.tie_word_embeddings, bool | None):
            raise ConfigError(
                "tie_word_embeddings must be True, False or None, not a"
                f" {type(self.tie_word_embeddings).__name__}"
            )
        if self.preemption == "swap" and not self.host_cache_bytes:
            raise ConfigError(
                "preemption='swap' needs a host cache to swap to: set host_cache_bytes"
            )
        fraction = self.memory_fraction
        if fraction is not None and (
            isinstance(fraction, bool)
            or not isinstance(fraction, (int, float))
            or not 0 < fraction <= 1  # NaN fails too
        ):
            raise ConfigError(f"memory_fraction must be in (0, 1], not {fraction!r}")
        most_itl = self.max_itl_ms
        if most_itl is not None and (
            isinstance(most_itl, bool)
            or not isinstance(most_itl, (int, float))
            or not 0 < most_itl < float("inf")  # NaN fails too
        ):
            raise ConfigError(
                f"max_itl_ms must be a positive number of milliseconds, not {most_itl!r}:"
                " leave it out to have chunks of prefill_chunk"
            )
        given = [name for name in MEMORY_BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"give at most one memory budget, not {' and '.join(given)}")
        if self.memory_tokens is not None and self.num_blocks is not None:
            raise ConfigError("memory_tokens and num_blocks both fix the cache: give one of them")
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_rows:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} leaves no room for a prompt beside"
                f" max_rows={self.max_rows} decoding rows: it must be greater"
            )
        if self.buckets is not None:
            if not isinstance(self.buckets, tuple) or not self.buckets:
                raise ConfigError(
                    f"buckets must be a non-empty tuple of numbers of rows, not {self.buckets!r}"
                )
            for bucket in self.buckets:
                _check_int("buckets", bucket, 1, self.max_rows)

    def memory_budget(self, device: torch.device) -> MemoryBudget:
        """Return the budget that was given, or the default share of the free memory."""
        if self.memory_bytes is not None:
            return MemoryBudget(bytes=self.memory_bytes)
        if self.memory_tokens is not None:
            return MemoryBudget(context_tokens=self.memory_tokens)
        if self.memory_fraction is not None:
            return MemoryBudget(fraction=self.memory_fraction)
        if self.num_blocks is not None:
            return MemoryBudget(num_blocks=self.num_blocks)
        return MemoryBudget(fraction=DEFAULT_MEMORY_FRACTION[device.type])

    @property
    def fixed_blocks(self) -> int | None:
        """The number of blocks where another budget stands beside it."""
        has_budget = self.memory_bytes is not None or self.memory_fraction is not None
        return self.num_blocks if has_budget else None


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The choices as made for one model on one device."""

    user: EngineConfig
    """What was asked for."""
    device: torch.device
    dtype: torch.dtype
    weights: WeightStorage
    """How the weights of linear layers are stored."""
    storage: Storage
    """How the cache stores keys and values."""
    kernels: KernelChoice
    """What runs; `native_obstacle` says why some operations fall back to `torch`."""
    native_obstacle: str | None
    """Why some operations of the model have no native kernel; None where all of them have one."""
    mode: Mode
    max_model_len: int
    """What the model allows and the user asked for; the cache may hold less (see `Engine`)."""

    @property
    def beside_host(self) -> bool:
        """Whether the device works while the host goes on, so that a step may be under way and
        outputs have to be brought to where the host reads them."""
        return self.device.type != "cpu"

    @property
    def compiled(self) -> bool:
        """Whether what has no native kernel is compiled by `torch.compile`."""
        return self.mode == "compile" or (self.mode == "graph" and self.user.compile)

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one element of a stored key or value."""
        return self.dtype.itemsize if self.storage == "model" else 1

    @property
    def kv_scale_bytes(self) -> int:
        """Bytes of the scale of one stored vector."""
        return SCALE_BYTES[self.storage]

    @classmethod
    def resolve(cls, config: EngineConfig, model: ModelConfig) -> ResolvedConfig:
        """Make the choices that were left open.

        Raises:
            ConfigError: the device does not exist, the mode or the kernels cannot run on it or
                with this model, or `max_model_len` exceeds what the model was made for.
        """
        device = resolve_device(config.device)
        longest = model.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the {longest} positions of the model"
            )
        dtype = DTYPES[model.torch_dtype if config.dtype == "auto" else config.dtype]
        weights = cast(
            WeightStorage, "model" if config.weight_dtype == "auto" else config.weight_dtype
        )
        mode = _resolve_mode(config.mode, device)
        obstacle = native_obstacle(device.type, dtype, weights, latent=model.latent is not None)
        return cls(
            user=config,
            device=device,
            dtype=dtype,
            weights=weights,
            storage="model" if config.kv_dtype == "auto" else cast(Storage, config.kv_dtype),
            kernels=resolve_kernels(config.kernels, mode, obstacle, _missing_for_native(device)),
            native_obstacle=obstacle,
            mode=mode,
            max_model_len=config.max_model_len or longest,
        )


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: there is no such device, or none that stepgraph runs on.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device {name!r} is not a device: use 'auto', 'cpu' or 'cuda'"
        ) from error
    if device.type not in DEFAULT_MEMORY_FRACTION:
        raise ConfigError(f"device {name!r} is not supported: use 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _resolve_mode(mode: str, device: torch.device) -> Mode:
    if device.type == "cuda":
        return "graph" if mode == "auto" else _as_mode(mode)
    if mode == "graph":
        raise ConfigError(
            f"mode='graph' needs a CUDA device, but the device is {str(device)!r}:"
            " use mode='compile' or mode='eager'"
        )
    if mode in ("auto", "compile") and not have_compiler():
        if mode == "compile":
            raise ConfigError(
                "mode='compile' needs a C++ compiler on a CPU, and none was found:"
                " install g++ (or set CXX), or use mode='eager'"
            )
        logger.warning("no C++ compiler was found: decoding eagerly, which is several times slower")
        return "eager"
    return "compile" if mode == "auto" else _as_mode(mode)


def resolve_kernels(
    kernels: str, mode: Mode, obstacle: str | None, missing: str | None = None
) -> KernelChoice:
    """Return what runs where `kernels` was asked for.

    Args:
        kernels: `auto`, `native` or `torch`.
        mode: how steps run.
        obstacle: why the model has no native kernel for some operations, see `native_obstacle`.
        missing: what native kernels need and this machine lacks.

    Raises:
        ConfigError: native kernels were asked for, and this machine or model cannot have them.
    """
    if kernels == "torch" or (kernels == "auto" and mode == "eager"):
        return "torch"
    if kernels == "native":
        if missing is not None:
            raise ConfigError(
                f"kernels='native' needs {missing}, or use kernels='torch' or kernels='auto'"
            )
        if obstacle is not None:
            raise ConfigError(
                f"kernels='native' does not support this model: {obstacle}. Use kernels='auto',"
                " which takes native kernels where there are any, or kernels='torch'"
            )
    elif missing is not None:
        logger.warning(
            "native kernels need %s; steps run in plain PyTorch, which is slower", missing
        )
        return "torch"
    return "native"


def _missing_for_native(device: torch.device) -> str | None:
    """Return what native kernels need that this machine lacks."""
    if device.type == "cpu":
        return None if have_compiler() else "a C++ compiler: install g++ (or set CXX)"
    return None if have_triton() else "the package triton: install it"


def _as_mode(mode: str) -> Mode:
    return cast(Mode, mode)  # one of `EngineConfig`'s checked choices


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, not {value!r}")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{field} must be an integer from {low} to {high}, not {value!r}")
