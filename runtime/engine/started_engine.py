"""The parts of a started engine: their lifetime, and what they report."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ...cache.memory.handler import MemoryPlan
from ...profiling.timeline import Timeline
from ..arguments import MAX_COUNT, check_integer, check_number, check_type
from ..errors import RankError
from ..loading.opened_source import OpenedSource
from ..loading.tokenizer import TextTokenizer
from ..models.decoder_model import DecoderConfig, DecoderModel
from ..request import RequestGroup
from ..sampling_params import SamplingDefaults
from .calibration import calibrated_speculator, calibrated_step_budget
from .encoded_contents import EncodedContents
from .engine_metrics import EngineCounters, EngineGauges
from .engine_parts import EngineParts
from .engine_stats import engine_stats
from .intake import Intake
from .loop import StepLoop
from .rank_start import agree_on_weights, ended_by_failures
from .shared_loop import SharedLoop
from .startup import make_loop
from .weight_reload import open_replacement, overwriting

__all__ = ["StartedEngine"]


class StartedEngine:
    """Owns the parts and the loop over them, until `close`."""

    def __init__(self, parts: EngineParts) -> None:
        """Take the parts that `startup.start` made, and make the loop."""
        config = parts.config
        self.config = config
        self.model_config: DecoderConfig = parts.model.config
        self.max_model_len = config.max_model_len
        """Maximum tokens of one sequence, prompt and output."""
        self._parts: EngineParts | None = parts
        with ended_by_failures(parts.group):
            self._step_budget = calibrated_step_budget(parts.runner, parts.groups, config)
            speculator = calibrated_speculator(parts.runner, config)
            self._shared = SharedLoop(make_loop(parts, self._step_budget, speculator))
        self._encoded = EncodedContents(
            config.encoder_cache_bytes, parts.model.config.hidden_size, config.dtype
        )
        self._intake = Intake(
            parts.model.config,
            parts.tokenizer,
            longest_sequence=self.max_model_len,
            seed=config.seed,
            prefix_block_size=config.block_size if config.prefix_cache else None,
            embeds_dtype=config.dtype if config.prompt_embeds else None,
            structured_output=config.structured_output,
            defaults=parts.sampling_defaults,
            one_token_steps=config.steps_per_launch == 1 and config.user.speculation is None,
        )
        if config.freeze_gc:
            gc.collect()  # garbage that is frozen is never freed
            gc.freeze()

    def __enter__(self) -> Self:
        self._open_parts()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory. Unfinished requests end without an output. Idempotent.

        Waits for the current step of another thread; calls of `generate` there raise
        `EngineClosedError`. Does nothing in a forked child.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
        """
        self._shared.close(self._release_memory)

    def _release_memory(self, loop: StepLoop) -> None:
        """Free everything. May be repeated after an interrupt."""
        if self._parts is None:
            return
        device = self.config.device
        if device.type == "cuda" and self._shared.healthy:
            torch.cuda.synchronize(device)  # launched steps still write to the arena
        loop.close()
        if self._parts.group is not None:
            _end_ranks(self._parts)
        if self._parts.model.stack is not None:
            self._parts.model.stack.close()
        if self._parts.model.kernels.collectives is not None:
            self._parts.model.kernels.collectives.close()
        if self._parts.runner.host_arena is not None:
            self._parts.runner.host_arena.close()
        self._parts = None
        self._encoded.cache.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache: the next requests compute their whole prompts.

        Running requests keep their blocks, which are no longer shared. Use it to measure time to
        first token without cached prefixes, or after the weights have changed.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.run("reset_prefix_cache", StepLoop.forget_contents)

    def cached_hashes(self) -> Callable[[int], list[bytes]]:
        """Return a function that lists the hashes of the cached blocks at this moment.

        It takes the most hashes to return, held blocks first, then those that are evicted last, and
        reads a copy: another thread may call it while steps run. Each hash is that of a prefix up
        to the end of a block (`PrefixHashes`). Without `prefix_cache` there are none.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        keys, suffix = self._shared.run(
            "cached_hashes", lambda loop: loop.scheduler.cache.cached_keys()
        )

        def latest(most: int) -> list[bytes]:
            return keys.latest(check_integer("most", most, 0, MAX_COUNT), suffix)

        return latest

    def reload_weights(self, source: str | Path) -> None:
        """Replace the weights by those of another checkpoint, without preparing steps again.

        The weights are copied into the present tensors one by one; captured graphs and compiled
        code stay valid. With `model_impl="transformers"` all of them are in memory twice
        meanwhile. Tokenizer, chat templates and end-of-sequence tokens are replaced too; the
        prefix cache and the cache of `encode` are cleared. Prompts that another thread adds during
        the call may be tokenised by the previous tokenizer.

        Args:
            source: see `from_pretrained`. Its config must be that of the engine's model, except for
                `bos_token_id`, `eos_token_id`, a dtype that `EngineConfig.dtype` overrides, and
                `max_position_embeddings` of a native family where `max_model_len` is given.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unsupported or inconsistent.
                Nothing has changed.
            ConfigError: a field of its config differs; the message has both values. Nothing has
                changed.
            RequestError: requests are unfinished. Nothing has changed.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError: the engine is closed.
            EngineFailedError: a step failed, or reading the weights did: some of them are replaced,
                and the engine cannot be used any more.
        """
        self._shared.check_usable()
        parts = self._open_parts()
        with open_replacement(source, parts.model.config, parts.config.user) as new:
            self._shared.run_idle("reload_weights", partial(self._take_model, new))

    def _take_model(self, new: OpenedSource, loop: StepLoop) -> None:
        """Replace the weights, and all that reads the tokenizer or the config."""
        parts = self._open_parts()
        config = parts.config
        overwrite = overwriting(parts.model, new, config)

        def change() -> None:
            commands = parts.runner.commands
            if commands is not None:
                commands.reload(new.place)
            overwrite()
            if parts.group is not None:
                agree_on_weights(parts.group, parts.model)
            if config.device.type == "cuda":
                torch.cuda.synchronize(config.device)  # steps may run in another stream
            self.model_config = new.config
            defaults = new.defaults_for(config.user.generation_config)
            self._parts = dataclasses.replace(
                parts, tokenizer=new.tokenizer, sampling_defaults=defaults
            )
            self._intake = self._intake.for_model(new.config, new.tokenizer, defaults)
            self._encoded.clear()

        loop.change_weights(change)

    def timeline(self) -> Timeline:
        """Return a live view of the times of the last steps.

        `device_ns` of its records is None on CUDA for steps outside of `device_timing`.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return self._loop.timeline

    @contextmanager
    def device_timing(self) -> Iterator[Timeline]:
        """Measure the device time of the steps launched in this block; yield the timeline.

        On CUDA it records a timed event before and after each step. They take a few microseconds on
        the device, so steps outside the block are not timed. On a CPU all steps are timed. Blocks
        may be nested.

        Raises:
            EngineClosedError: the engine is closed.
        """
        runner = self._loop.runner
        before, runner.times_device = runner.times_device, True
        try:
            yield self._loop.timeline
        finally:
            runner.times_device = before

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The checkpoint's tokenizer; None for presets and without a `tokenizer.json`."""
        return self._open_parts().tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Values of fields that requests leave out; see `EngineConfig.generation_config`."""
        return self._open_parts().sampling_defaults

    @property
    def decoder(self) -> DecoderModel:
        """The loaded model, its weights stored as the kernels need them."""
        return self._open_parts().model

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan that set the size of the cache."""
        return self._open_parts().plan

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the weights that a decode step of one row reads."""
        return self.weight_bytes_read(1)

    def weight_bytes_read(self, rows: float) -> int:
        """Bytes of the weights that a decode step of `rows` rows reads.

        Only experts depend on the rows: this is the expectation if all are equally likely.
        """
        rows = check_number("rows", rows, 0, MAX_COUNT)
        return self._open_parts().model.weight_bytes_read(rows)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        return sum(group.spec.slot_bytes * len(group.layers) for group in self._open_parts().groups)

    def kv_bytes_read(self, context: int) -> int:
        """Bytes of the cache that a row of `context` tokens reads in a decode step."""
        context = check_integer("context", context, 0, MAX_COUNT)
        return sum(group.bytes_read(context) for group in self._open_parts().groups)

    def positions_read(self, context: int) -> int:
        """Tokens that a row of `context` tokens attends to, summed over the layers."""
        context = check_integer("context", context, 0, MAX_COUNT)
        return sum(group.positions_read(context) for group in self._open_parts().groups)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes, as plain numbers and strings.

        State: `healthy`, `device`, `mode`, `kernels`, `threads` (of the native operators on a CPU,
        otherwise None), `max_model_len`, `waiting` and `running` requests.

        Counters: `requests`, `finished` requests, `output_tokens`, `steps` (launches),
        `multi_step_launches` (with several decode steps), `fallbacks` (parts of a launch without a
        prepared step), `preemptions`, `failed_copies`, `non_finite` (requests that ended with
        `NonFiniteLogitsError`), and `scored_prompt_tokens` (for `prompt_logprobs`, by uncaptured
        operations after a prefill step).

        - `tensor_parallel`: processes of the engine; `collectives`: the class of the operations
          between them, or None. `collectives_choice`: on CUDA what was chosen (`used`), why
          (`reason`), `errors` of candidates, and `us`, their times by bytes; otherwise None.
        - `kernel_fallbacks`: native operations that plain PyTorch replaces, with the reason.
        - `blocks`: blocks by state. `cache`: known and cached tokens at first admissions
          (`queried_tokens`, `hit_tokens`), forks, copied and swapped blocks. `encoder_cache`:
          bytes, hits, misses and evictions.
        - `start`: seconds of each phase, whether kernels and compiled code came from a cache, and
          how many Triton kernels were compiled ahead, in how many threads. `load_seconds`: seconds
          to read and pack the weights. `prepared`: the cost of the prepared steps.
        - `memory`: planned and measured bytes of each term; a note says why a measurement is None.
          `memory_phases`: memory and seconds of each phase of the start.
        - `collector`: number and seconds of the runs of Python's garbage collector since the engine
          was created.
        - `step_budget` (None without `max_itl_ms`): predicted and measured times of mixed prefill
          and decode steps; see docs/embedding.md.
        - `speculation` (None without it): `method`, `verify_steps`, `verified_rows` (with drafts),
          `drafted` and `accepted` drafts (also by position), and `step_seconds`, the times of steps
          by "rows x tokens per row".
        - `padding`: share of padding in the rows and tokens of all steps.
        """
        return engine_stats(
            self._open_parts(),
            self._loop,
            self._encoded.cache,
            self._step_budget,
            max_model_len=self.max_model_len,
            healthy=self._shared.healthy,
        )

    def gauges(self) -> EngineGauges:
        """Return the present state. Takes microseconds; any thread may call it at any time."""
        parts, loop = self._parts, self._loop  # in this order: another thread may close it
        assert parts is not None
        return EngineGauges.of(parts, loop)

    def num_cached_tokens(self, group: RequestGroup) -> int:
        """Return how many tokens of a prompt that is not queued yet are in the prefix cache.

        For the thread that runs the steps, between two of them.
        """
        first = check_type("group", group, RequestGroup, "a prepared request").requests[0]
        if first.prefix_hashes is None:
            return 0
        return self._loop.scheduler.cache.num_shareable(
            len(group.prompt_ids), first.prefix_hashes, first.reusable_tokens
        )

    def counters(self) -> EngineCounters:
        """Return the totals so far. Takes microseconds; any thread may call it at any time."""
        return EngineCounters.of(self._loop)

    @property
    def has_ranks(self) -> bool:
        """Whether other processes share the model (`tensor_parallel`)."""
        return self._loop.group is not None

    def check_ranks(self) -> None:
        """Raise `RankError` if another process of a tensor-parallel engine has failed."""
        self._shared.run("check_ranks", StepLoop.check_ranks)

    def check_integrity(self) -> None:
        """Assert all invariants that hold between two steps. For tests."""
        self._shared.run("check_integrity", StepLoop.check_integrity)

    @property
    def _loop(self) -> StepLoop:
        return self._shared.open_loop

    def _open_parts(self) -> EngineParts:
        _ = self._loop
        assert self._parts is not None
        return self._parts


def _end_ranks(parts: EngineParts) -> None:
    """End the other processes of a tensor-parallel engine."""
    assert parts.group is not None
    if parts.runner.commands is not None:
        with suppress(RankError):  # they have ended
            parts.runner.commands.close()
    parts.group.close()
