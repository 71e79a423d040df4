"""`ResolvedConfig`: the configuration of one engine, with `auto` and None resolved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from ...cache.arena import Storage
from ...graphs.buckets import Buckets, default_row_buckets, default_token_buckets
from ..bounded_repr import bounded_repr
from ..config import EngineConfig, Speculation
from ..errors import ConfigError
from ..kernels import (
    KernelChoice,
    Mode,
    cpu_kernels_obstacle,
    have_compiler,
    have_triton,
    native_gaps,
    native_obstacle,
    resolve_threads,
)
from ..kernels.result_check import warn
from ..kernels.weights import MODEL, STORAGES, WeightStorage
from .config import DecoderConfig, ModelConfig
from .plan import plan_of

MAX_PREFILL_ROWS = 8
"""A prefill step computes logits for this many rows, used or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """The configuration of one engine: an `EngineConfig` resolved for a model and a device.

    It has every size that follows from the configuration. The memory plan reduces two of them
    (`fit_to_cache`).
    """

    user: EngineConfig
    """As given: the fields that need no resolving, budgets, and values for messages."""
    device: torch.device
    dtype: torch.dtype
    weights: WeightStorage
    """How the weights of linear layers are stored."""
    storage: Storage
    """How the cache stores keys and values."""
    model_impl: Literal["native", "transformers"]
    kernels: KernelChoice
    native_obstacle: str | None
    """Why some operations of the model have no native kernel and run in plain PyTorch."""
    mode: Mode
    threads: int
    """Of the native operators on a CPU."""
    max_model_len: int
    """Of one sequence, by model and configuration, and by the cache once that is planned."""
    prefill_chunk: int
    """Maximum prompt tokens per step, by configuration, and by the memory plan once it is made."""
    speculation: Speculation | None
    structured_output: bool

    @property
    def is_async_device(self) -> bool:
        """Whether launches return before the device has run them, as on CUDA."""
        return self.device.type != "cpu"

    @property
    def compiled(self) -> bool:
        """Whether `torch.compile` compiles steps without native layers."""
        return self.mode == "compile" or (self.mode == "graph" and self.user.compile)

    @property
    def max_prefill_rows(self) -> int:
        """Maximum prompts with a chunk in one prefill step."""
        return min(MAX_PREFILL_ROWS, self.user.max_num_seqs)

    @property
    def mixed_rows(self) -> int:
        """Maximum decoding rows that one forward pass computes together with prompt chunks.

        0 where these are two launches: on CUDA, without native layers, and with a drafter.
        """
        native = self.kernels == "native" and self.native_obstacle is None
        if self.is_async_device or not native or self.proposed_drafts:
            return 0
        return self.user.max_num_seqs - 1

    @property
    def prefill_tokens(self) -> int:
        """Maximum tokens of a prefill step, with the decoding rows that it may have."""
        return self.prefill_chunk + self.mixed_rows

    @property
    def prefill_rows(self) -> int:
        """Maximum rows of a prefill step. Each row that decodes is not one with a chunk."""
        return max(self.max_prefill_rows, self.mixed_rows + 1)

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of the longest sequence in one layer group: columns of a block table."""
        return -(-self.max_model_len // self.user.block_size)

    @property
    def row_buckets(self) -> Buckets:
        """Numbers of rows that decode steps are prepared for; the largest is `max_num_seqs`."""
        if self.user.buckets is None:
            return default_row_buckets(self.user.max_num_seqs)
        return Buckets((*self.user.buckets, self.user.max_num_seqs))

    @property
    def token_buckets(self) -> Buckets:
        """Tokens of the prefill steps that are prepared; the largest number is `prefill_tokens`."""
        return default_token_buckets(self.prefill_tokens, fine=self.user.max_itl_ms is not None)

    @property
    def tokens_per_row(self) -> tuple[int, ...]:
        """Tokens per row of the prepared verify steps, ascending; () without speculation."""
        return () if self.speculation is None else self.speculation.tokens_per_row

    @property
    def proposed_drafts(self) -> int:
        """Drafts that the drafter proposes in a step; 0 without a drafter on the device."""
        if self.speculation is None or not self.speculation.uses_drafter:
            return 0
        return self.speculation.num_speculative_tokens

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row that a decode or verify step computes."""
        return 1 if self.speculation is None else 1 + self.speculation.num_speculative_tokens

    @property
    def kept_drafts(self) -> int:
        """Drafts that each row keeps on the device, so that the next step can be planned before the
        host has read them; 0 where steps run synchronously."""
        return self.proposed_drafts if self.is_async_device else 0

    @property
    def most_lanes(self) -> int:
        """Maximum tokens that a decode or verify step samples.

        A verify step has no more than a prefill step, which the activations are planned for.
        """
        verified = min(
            self.user.max_num_seqs * max(self.tokens_per_row, default=1), self.prefill_tokens
        )
        return max(self.user.max_num_seqs, verified)

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one element of a stored key or value."""
        return self.dtype.itemsize if self.storage == "model" else 1

    def fit_to_cache(self, *, max_model_len: int, max_batch_tokens: int) -> ResolvedConfig:
        """Return the configuration with the sizes that the cache has room for: tokens of the
        longest sequence, and of one step."""
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            prefill_chunk=min(self.prefill_chunk, max_batch_tokens),
        )

    @classmethod
    def resolve(cls, config: EngineConfig, model: DecoderConfig) -> ResolvedConfig:
        """Return the configuration of an engine for a model on this machine.

        Raises `ConfigError` if the device does not exist, does not support the mode or the kernels,
        or `max_model_len` exceeds the positions of the model.
        """
        device = resolve_device(config.device)
        longest = model.longest_context
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the {longest} positions of the"
                " model",
                field="max_model_len",
            )
        if plan_of(model).row_states:
            _check_row_states(config)
        if config.weight_dtype == "int4" and not isinstance(model, ModelConfig):
            raise ConfigError(
                "weight_dtype='int4' is for native families, and transformers makes the layers of"
                f" {model.model_type!r}: use weight_dtype='int8'",
                field="weight_dtype",
            )
        dtype = getattr(torch, model.torch_dtype if config.dtype == "auto" else config.dtype)
        weights = MODEL if config.weight_dtype == "auto" else STORAGES[config.weight_dtype]
        if config.batch_invariant:
            check_batch_invariant(config, device, dtype, weights, model)
        obstacle = native_obstacle(device.type, dtype, weights, plan_of(model))
        mode = _resolve_mode(config, device, obstacle)
        if config.batch_invariant and obstacle is not None:
            mode = "eager"  # what is compiled for one token differs from that for several
        native = config.kernels == "native" or (config.kernels == "auto" and mode != "eager")
        missing = _missing_for_native(device) if native or config.batch_invariant else None
        if config.batch_invariant and missing is not None:
            raise ConfigError(f"batch_invariant=True needs {missing}", field="batch_invariant")
        kernels = resolve_kernels(config.kernels, mode, obstacle, missing)
        if config.batch_invariant:
            kernels = "native"
        return cls(
            user=config,
            device=device,
            dtype=dtype,
            weights=weights,
            storage="model" if config.kv_dtype == "auto" else config.kv_dtype,
            model_impl="native" if isinstance(model, ModelConfig) else "transformers",
            kernels=kernels,
            native_obstacle=obstacle,
            mode=mode,
            threads=_threads(config),
            max_model_len=config.max_model_len or longest,
            prefill_chunk=config.prefill_chunk,
            speculation=None if config.speculation is None else Speculation.of(config.speculation),
            structured_output=resolve_masks(config, device, mode, kernels),
        )


def _check_row_states(config: EngineConfig) -> None:
    """Check that blocks and drafts suit recurrent layers. Raises `ConfigError`."""
    if config.block_size > MOST_STATE_BLOCK:
        raise ConfigError(
            f"block_size={config.block_size} is too large for recurrent layers, which read the"
            f" inputs of a block in each step: use at most {MOST_STATE_BLOCK}",
            field="block_size",
        )
    if config.speculation is None:
        return
    drafts = Speculation.of(config.speculation).num_speculative_tokens
    if drafts >= config.block_size:
        raise ConfigError(
            f"num_speculative_tokens={drafts} must be less than block_size={config.block_size}:"
            " recurrent layers can take back the tokens of one block",
            field="speculation",
        )


MOST_STATE_BLOCK = 64
"""Largest block of models with recurrent layers, in tokens."""


def resolve_masks(
    config: EngineConfig, device: torch.device, mode: Mode, kernels: KernelChoice
) -> bool:
    """Return whether steps can apply token masks: by default where they cost others nothing.

    On CUDA a step with masks has two parts, each with graphs of its own. On a CPU it is one step,
    but the sampler in plain PyTorch has other code for masks, which would take minutes to compile.
    """
    if config.structured_output is not None:
        return config.structured_output
    compiles = mode == "compile" and kernels == "torch"
    return device.type == "cpu" and mode != "graph" and not compiles


def _threads(config: EngineConfig) -> int:
    """Return the threads of a process: a number that is not given is divided among the ranks."""
    threads = resolve_threads(config.threads)
    if config.threads is None or config.threads < 0:
        threads = max(threads // config.tensor_parallel, 1)
    return threads


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA if there is a device, else the CPU.

    Raises `ConfigError` if the device does not exist or is not supported.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"device {bounded_repr(name)} is not a device: use 'auto', 'cpu' or 'cuda'",
            field="device",
        ) from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if device.type not in counts:
        raise ConfigError(
            f"device {bounded_repr(name)} is not supported: use 'cpu' or 'cuda'", field="device"
        )
    # torch wraps an index to 8 bits, so the device may not be the one named.
    wrapped = device.index is not None and str(device) != name
    if wrapped or (device.index or 0) >= counts[device.type]:
        raise ConfigError(
            f"device {bounded_repr(name)} does not exist: there are 'cpu' and {counts['cuda']} CUDA"
            " devices",
            field="device",
        )
    return device


def _resolve_mode(config: EngineConfig, device: torch.device, obstacle: str | None) -> Mode:
    mode = config.mode
    if device.type == "cuda":
        return "graph" if mode == "auto" else mode
    if mode == "graph":
        raise ConfigError(
            f"mode='graph' needs a CUDA device, but the device is {str(device)!r}:"
            " use mode='compile' or mode='eager'",
            field="mode",
        )
    if mode != "eager":
        # Steps without native kernels are compiled by torch.compile, which needs the compiler.
        compiled_by_torch = config.kernels == "torch" or obstacle is not None
        missing = None if compiled_by_torch else _missing_for_native(device)
        if compiled_by_torch and not have_compiler():
            missing = "a C++ compiler: install g++ (or set CXX)"
        if missing is not None and mode == "compile":
            raise ConfigError(
                f"mode='compile' needs {missing} on a CPU, or use mode='eager'", field="mode"
            )
        if missing is not None:
            if config.kernels != "native":  # which is refused
                warn(
                    f"steps run in mode='eager', many times slower than mode='compile', which "
                    f"needs {missing}"
                )
            return "eager"
    return "compile" if mode == "auto" else mode


def resolve_kernels(
    kernels: str, mode: Mode, obstacle: str | None, missing: str | None = None
) -> KernelChoice:
    """Return the kernels that run for `EngineConfig.kernels`.

    `missing`: what native kernels need and this machine lacks. Raises `ConfigError` for `native` if
    this machine, or the model, does not support it.
    """
    if kernels == "torch" or (kernels == "auto" and mode == "eager"):
        return "torch"
    if kernels == "native":
        if missing is not None:
            raise ConfigError(
                f"kernels='native' needs {missing}, or use kernels='torch' or kernels='auto'",
                field="kernels",
            )
        if obstacle is not None:
            raise ConfigError(
                f"kernels='native' does not support this model: {obstacle}. Use kernels='auto',"
                " which uses native kernels where it can, or kernels='torch'",
                field="kernels",
            )
    elif missing is not None:
        warn(f"native kernels need {missing}; steps run in plain PyTorch, which is slower")
        return "torch"
    return "native"


def _missing_for_native(device: torch.device) -> str | None:
    """Return what native kernels need and this machine lacks, or None."""
    if device.type == "cpu":
        return cpu_kernels_obstacle()
    return None if have_triton() else "the package triton: install it"


# Which configurations can promise `batch_invariant`: docs/batch-invariance.md.


def check_batch_invariant(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightStorage,
    model: DecoderConfig,
) -> None:
    """Raise `ConfigError`, which says what to change, if the logits of a row would depend on its
    batch."""
    on_cpu = device.type == "cpu"
    plan = plan_of(model)
    gaps = native_gaps(device.type, dtype, weights, plan)
    gap = gaps[0].reason if gaps else ""
    refusals = (
        (config.kernels == "torch", "kernels='torch'", "kernels='auto' or kernels='native'"),
        (
            not isinstance(model, ModelConfig),
            f"model_impl={config.model_impl!r} and a model of transformers",
            "a model with a native family (docs/models.md)",
        ),
        (
            gaps and not on_cpu,
            f"model type {model.model_type!r} on CUDA ({gap})",
            "device='cpu'",
        ),
        (
            config.tensor_parallel > 1 and not on_cpu,
            f"tensor_parallel={config.tensor_parallel} on CUDA",
            "tensor_parallel=1 or device='cpu'",
        ),
        (
            dtype == torch.float16 and on_cpu,
            f"dtype={config.dtype!r} and a model in float16 on a CPU",
            "dtype='bfloat16' or dtype='float32'",
        ),
        (
            gaps and config.mode == "compile" and on_cpu,
            f"mode='compile' and this model ({gap})",
            "mode='auto' or mode='eager'",
        ),
        (
            any("ungated" in op.traits for layer in plan.layers for op in layer.operations),
            f"model type {model.model_type!r}, whose experts have no gate",
            "a model whose experts have gates",
        ),
    )
    for refused, what, remedy in refusals:
        if refused:
            raise ConfigError(
                f"batch_invariant=True does not support {what}: set batch_invariant=False, or use"
                f" {remedy}. docs/batch-invariance.md has the reasons",
                field="batch_invariant",
            )
