"""The user's configuration: `EngineConfig`, and `Speculation` in it. No torch.

`ResolvedConfig` is what an `EngineConfig` resolves to for a model and a device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING, Annotated, Any, Literal

from .arguments import Range, check_fields, from_mapping
from .bounded_repr import bounded_repr
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

MEMORY_BUDGETS = ("memory_fraction", "memory_bytes", "memory_tokens")
MAX_ROWS = 4096
MAX_SEED = 2**63 - 1

DEFAULT_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.5}
"""Default share of the free memory, by type of device. A CPU leaves more to other processes."""

MAX_DRAFTS = 15
DRAFTER_METHODS = ("draft_model", "eagle3", "mtp", "dflash")
_DRAFT_BUCKETS = (1, 2, 3, 4, 7, 15)
_AUTO_MTP_DRAFTS = 3
"""A module takes a pass for each draft, and most were trained to predict one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """How an engine drafts tokens, for steps that verify several tokens per row.

    Tokens are the same with and without it. See docs/speculation.md.

    Attributes:
        method: the proposer. `suffix`: tokens that followed earlier occurrences of the newest
            tokens in prompt and output, the most frequent ones first. `ngram`: those that followed
            the latest such occurrence. `draft_model`, `eagle3`, `mtp`, `dflash`: those that a
            drafter on the device proposes: a smaller model, an EAGLE-3 head, a module for
            multi-token prediction, or a model that fills a block of tokens at once. `auto`: `mtp`
            with at most 3 drafts where the checkpoint has such a module, else `suffix`.
        model: the checkpoint of the drafter: a directory, a hub id, `demo` or `preset:NAME`. None:
            for `mtp` the model's own directory, for other drafters the directory `drafter` in it.
        num_speculative_tokens: maximum drafts of a row and step. The engine chooses fewer,
            or none, by measured acceptance and step times.
        prompt_lookup_min: tokens that an earlier occurrence must share with the newest
            tokens.
        adaptive: whether measured acceptance and step times decide how many drafts are verified.
            False verifies every draft, which can be slower than no drafts at all.
        share_outputs: whether requests also draft from recent outputs of others with the same
            `cache_salt`, where prompt and output have no match or a shorter one. Requests without
            a salt share theirs.

    Raises:
        ConfigError: a value is out of range; it names field, value and range.
    """

    method: Literal["suffix", "ngram", "draft_model", "eagle3", "mtp", "dflash", "auto"] = "suffix"
    model: Annotated[str, Range(1, 4096)] | None = None
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)] = 7
    prompt_lookup_min: Annotated[int, Range(2, 32)] = 3
    adaptive: bool = True
    share_outputs: bool = False

    def __post_init__(self) -> None:
        check_fields(self, ConfigError, within="speculation")
        if self.model is not None and not self.uses_drafter:
            raise ConfigError(
                f"speculation method {self.method!r} has no model: use one of"
                f" {', '.join(DRAFTER_METHODS)}, or leave model out",
                field="speculation",
            )

    @classmethod
    def of(cls, given: object) -> Speculation:
        """Return the speculation of a method's name or of a mapping of fields, or raise
        `ConfigError`."""
        if isinstance(given, Speculation):
            return given
        if isinstance(given, str):
            given = {"method": given}
        if not isinstance(given, Mapping):
            raise ConfigError(
                "speculation must be a method such as 'suffix', a mapping such as"
                " {'method': 'suffix', 'num_speculative_tokens': 7}, a Speculation or None, not"
                f" {bounded_repr(given)}",
                field="speculation",
            )
        if isinstance(given.get("model"), os.PathLike):
            given = {**given, "model": os.fspath(given["model"])}
        return from_mapping(cls, given, ConfigError, "speculation")

    def for_checkpoint(self, has_module: bool) -> Speculation:
        """Return the speculation of a model whose checkpoint has a module for multi-token
        prediction or not: what `auto` stands for."""
        if self.method != "auto":
            return self
        if not has_module:
            return replace(self, method="suffix")
        most = min(self.num_speculative_tokens, _AUTO_MTP_DRAFTS)
        return replace(self, method="mtp", num_speculative_tokens=most)

    @property
    def uses_drafter(self) -> bool:
        """Whether a model on the device proposes the drafts."""
        return self.method in DRAFTER_METHODS

    @property
    def tokens_per_row(self) -> tuple[int, ...]:
        """The numbers of tokens per row that verify steps are prepared for, ascending."""
        most = self.num_speculative_tokens
        return tuple(1 + drafts for drafts in (*(b for b in _DRAFT_BUCKETS if b < most), most))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs. Every field has a default; None means that the engine chooses.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1` and so on; `auto` selects CUDA if a device exists.
        dtype: dtype of weights and activations: `float32`, `bfloat16`, `float16`; `auto` keeps the
            checkpoint's dtype.
        weight_dtype: dtype of linear layers and embeddings: `int8`, with a scale for each
            output channel; `fp8` (e4m3), with a scale for every 128 inputs of a channel; `int4`,
            with a scale and a minimum for every 32 inputs, but `dtype` for embeddings and head
            (native families and kernels); `auto` keeps the bits of a quantised checkpoint, and is
            `dtype` for another one.
        activation_dtype: `int8` rounds the inputs of products over the codes of weights, with a
            scale for each group of the weight, which is faster and costs accuracy; on CPUs with
            AVX512-VNNI, for quantised checkpoints and other values of `weight_dtype`. Levels that
            are not consecutive integers (fp4, e4m3, IQ4) are multiplied in `dtype`, as all are with
            `auto`.
        kv_dtype: dtype of the cache: `int8` or `fp8` (e4m3), with a scale for each token and head;
            `auto` is `dtype`.
        model_impl: where the layers of the model come from. `native`: a model family of this
            package; `transformers`: the model's class in the package transformers, compiled by
            `torch.compile` around this package's cache, attention and linear layers; `auto`:
            `native` if the model has a family, else `transformers`. See docs/models.md.
        kernels: the implementation of a step's operations. `native`: the C++ operators on a CPU,
            the Triton kernels on CUDA; the start fails if one is missing or fails its check.
            `torch`: plain PyTorch around the paged attention operation. `auto`: `native`, with
            `torch` for operations without a native kernel or whose kernel fails its check; `torch`
            with `mode="eager"`. See docs/getting-started.md.
        mode: how steps run. `eager`: without preparation. `compile`: they are prepared at
            start, and `torch.compile` compiles those without native kernels. `graph`: like
            `compile`, and captured as CUDA graphs. `auto`: the fastest mode for the device.
        compile: whether `torch.compile` compiles steps before they are captured, with
            `mode="graph"` and without native layers.
        dependent_launch: whether Triton kernels may begin while their predecessors still run
            (programmatic dependent launch, compute capability 9.0). The self-test at start disables
            it if it changes a result.
        batch_invariant: whether the logits of a token have the same bits whatever else is in the
            step: other rows, padding, the chunks of its prompt, drafts, cached prefixes, blocks
            that were swapped. With native kernels; refused where it cannot be promised. On CUDA it
            costs time. See docs/batch-invariance.md.
        tensor_parallel: devices, and processes, that share the model: each holds a part of every
            layer. On a CPU each process has `threads` threads. See docs/tensor-parallel.md.
        rank_timeout: seconds after which a process of a tensor-parallel engine that
            does not respond ends the engine with `RankError`.
        threads: threads that run the native operators on a CPU, the calling thread included.
            None: one per physical core that the process may use, by its affinity mask, the
            CPU quota of its cgroup and `OMP_NUM_THREADS`. -1: one fewer, which leaves a core to
            other work; -2: two fewer, and so on. Engines of one process share a thread
            pool. PyTorch's own operations use `torch.get_num_threads()` threads. With
            `tensor_parallel`, the threads of each process; None: its share of the cores.
        block_size: tokens per cache block.
        num_blocks: blocks of the cache, the null block included. If `memory_fraction` or
            `memory_bytes` is given too, that budget determines `max_batch_tokens`, unless that is
            given.
        memory_fraction: share of the free memory that the engine may use. Without any
            budget it is 0.9 on CUDA and 0.5 on a CPU. The cache is at most as large as
            `max_num_seqs` requests of `max_model_len` tokens need. Use `num_blocks`,
            `memory_tokens` or `memory_bytes` (CUDA) for a larger prefix cache.
        memory_bytes: bytes that the engine uses on CUDA; on a CPU an upper limit, like
            `memory_fraction`.
        memory_tokens: tokens of context that the cache must hold.
        max_batch_tokens: maximum tokens per step, decoding rows and prefill chunk together;
            must be greater than `max_num_seqs`.
        max_num_seqs: maximum requests that decode together.
        prefix_cache: whether requests with a common prefix share its cache blocks.
        host_cache_bytes: bytes of host memory (pinned for CUDA) for the blocks of preempted
            requests, which are copied there and back. 0, or without room: their blocks are freed,
            and their tokens computed again.
        snapshot_bytes: bytes for cached snapshots of recurrent layers: the state after the prompt
            or the output of a request, from which later requests with the same prefix begin. None:
            two for each of `max_num_seqs`, at least 64 MiB. 0: only idle rows have room for some.
            See docs/hybrid-models.md.
        max_model_len: maximum tokens of one sequence, prompt and output; None: the limit of model
            and cache.
        prefill_chunk: maximum prompt tokens per step; limits how long a prefill delays decoding.
        max_itl_ms: target in milliseconds for steps that decode and prefill: chunks are
            sized by predicted step time, up to `prefill_chunk`. The predictions need a calibration
            at start. The smallest prefill step runs even if it takes longer, so that prompts always
            make progress. None: only `prefill_chunk` limits the chunk size.
        speculation: how tokens are drafted for steps that verify several tokens per row: a method
            (`suffix` or `ngram`), a mapping such as `{"method": "suffix", "num_speculative_tokens":
            7}`, or a `Speculation`. None: every step decodes one token per row. See
            docs/speculation.md.
        freeze_gc: whether Python's garbage collector ignores every object that exists once the
            engine is ready (`gc.freeze`), in the whole process and permanently. See
            docs/embedding.md.
        buckets: numbers of rows to prepare decode steps for, at most `max_num_seqs`, which is
            always one of them. None: chosen from `max_num_seqs`.
        prompt_embeds: whether embeddings may replace tokens of prompts; every prefill step then
            reads a buffer of `prefill_chunk` embeddings.
        structured_output: whether steps can apply token masks, which grammars
            (`SamplingParams.structured`, with the package llguidance, `stepgraph[structured]`),
            `allowed_token_ids` and `bad_words` need. On CUDA they take buffers for masks and
            logits, and more prepared steps. True also refuses to start without llguidance. None: on
            a CPU, unless `torch.compile` compiles the sampler (`kernels="torch"`). See
            docs/structured-output.md.
        generation_config: where parameters come from that a request leaves out. `auto`: the
            checkpoint's `generation_config.json` (`temperature`, `top_k`, `top_p`, `min_p`,
            `repetition_penalty`, `max_new_tokens`; `do_sample: false` is temperature 0), as in vLLM
            and transformers; `none`: the neutral values of `SamplingParams`.
        chat_template: a file with a Jinja template, which replaces the checkpoint's chat templates.
            None: the checkpoint's.
        tie_word_embeddings: whether the output head is the embedding. True ignores the checkpoint's
            `lm_head.weight`, False uses it. None: as in `config.json`; a checkpoint whose
            `lm_head.weight` differs from its tied embedding is refused.
        seed: seed of requests that have no seed, and of the weights of presets.

    Raises:
        ConfigError: a value is out of range or contradicts another; it names field, value and
            range.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weight_dtype: Literal["auto", "int8", "fp8", "int4"] = "auto"
    activation_dtype: Literal["auto", "int8"] = "auto"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    compile: bool = True
    dependent_launch: bool = True
    batch_invariant: bool = False
    tensor_parallel: Annotated[int, Range(1, 64)] = 1
    rank_timeout: Annotated[float, Range(1, 3600)] = 5.0
    threads: Annotated[int, Range(-1024, 1024)] | None = None
    block_size: Annotated[int, Range(1, 1024)] = 16
    num_blocks: Annotated[int, Range(2, 1 << 40)] | None = None
    memory_fraction: Annotated[float, Range(0, 1, above=True)] | None = None
    memory_bytes: Annotated[int, Range(1, 1 << 60)] | None = None
    memory_tokens: Annotated[int, Range(1, 1 << 50)] | None = None
    max_batch_tokens: Annotated[int, Range(2, 1 << 20)] | None = None
    max_num_seqs: Annotated[int, Range(1, MAX_ROWS)] = 16
    prefix_cache: bool = True
    host_cache_bytes: Annotated[int, Range(0, 1 << 60)] = 0
    snapshot_bytes: Annotated[int, Range(0, 1 << 60)] | None = None
    max_model_len: Annotated[int, Range(1, 1 << 40)] | None = None
    prefill_chunk: Annotated[int, Range(1, 1 << 20)] = 512
    max_itl_ms: Annotated[float, Range(0, 3_600_000, above=True)] | None = None
    speculation: Speculation | Mapping[str, Any] | str | None = None
    freeze_gc: bool = False
    buckets: Annotated[tuple[int, ...], Range(1, MAX_ROWS)] | None = None
    prompt_embeds: bool = False
    structured_output: bool | None = None
    generation_config: Literal["auto", "none"] = "auto"
    chat_template: Annotated[str, Range(1, 4096)] | None = None
    tie_word_embeddings: bool | None = None
    seed: Annotated[int, Range(0, MAX_SEED)] = 0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.threads == 0:
            raise ConfigError(
                "threads must not be 0: give a number of threads, -1 for all cores but one, or"
                " leave it out",
                field="threads",
            )
        if self.speculation is not None:
            object.__setattr__(self, "speculation", Speculation.of(self.speculation))
        given = [name for name in MEMORY_BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"give at most one of {', '.join(MEMORY_BUDGETS)}, not {' and '.join(given)}",
                field=given[0],
            )
        if self.memory_tokens is not None and self.num_blocks is not None:
            raise ConfigError(
                "memory_tokens and num_blocks both fix the cache: give one of them",
                field="num_blocks",
            )
        if self.max_batch_tokens is not None and self.max_batch_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens={self.max_batch_tokens} must be greater than"
                f" max_num_seqs={self.max_num_seqs}, to leave room for prompt tokens in a step"
                " in which all rows decode",
                field="max_batch_tokens",
            )
        for bucket in self.buckets or ():
            if not 1 <= bucket <= self.max_num_seqs:
                raise ConfigError(
                    f"each of buckets must be from 1 to max_num_seqs={self.max_num_seqs}, not"
                    f" {bounded_repr(bucket)}",
                    field="buckets",
                )

    def budget_bytes(self, device: torch.device, available: int) -> int | None:
        """Return the bytes that the engine may use if `available` are free.

        None: all of them, because the size of the cache is given.
        """
        fraction = self.memory_fraction
        if fraction is self.memory_bytes is self.memory_tokens is self.num_blocks is None:
            fraction = DEFAULT_MEMORY_FRACTION[device.type]
        return self.memory_bytes if fraction is None else floor(Fraction(fraction) * available)
