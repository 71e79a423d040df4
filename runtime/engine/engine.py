"""The synchronous engine, the public interface: requests in, outputs out.

`Intake` makes requests of prompts, `StepLoop` runs the steps (see `loop.py`), and `SharedLoop`
makes it safe for several threads. `StartedEngine` has the methods that concern no request.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast, get_args

import torch

from ...cache.encoder_outputs import EncoderOutputCache, content_key
from ...cache.memory.handler import MemoryPlan
from ...profiling.timeline import Timeline
from ..arguments import (
    MAX_COUNT,
    check_callable,
    check_choice,
    check_config,
    check_integer,
    check_number,
    check_type,
)
from ..config import EngineConfig
from ..errors import (
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    OverloadedError,
    RankError,
    RequestError,
)
from ..loading.chat_template import ChatPrompt, Message, chat_prompts
from ..loading.opened_source import OpenedSource
from ..loading.tokenizer import TextTokenizer
from ..models.decoder_model import DecoderConfig, DecoderModel
from ..prompt_embeds import EncodedContent, PromptEmbeds, check_embeds
from ..prompt_ids import plain_batch, type_name
from ..request import AbortReason, RequestGroup
from ..sampling_params import SamplingDefaults, SamplingParams
from ..structured_output import StructuredOutput
from .access import LoopAccess
from .engine_stats import EngineCounters, EngineGauges, engine_stats
from .forks import call_in_children
from .intake import Intake, Prompt
from .loop import StepLoop
from .rank_start import agree_on_weights, ended_by_failures
from .request_output import RequestOutput
from .startup import (
    EngineParts,
    calibrated_speculator,
    calibrated_step_budget,
    make_loop,
    open_replacement,
    overwriting,
    start,
)
from .tickets import GenerateCall, Ticket, Tickets

__all__ = ["EncodedContents", "Engine", "MakeGroup", "SharedLoop", "StartedEngine"]


# The cache of encoder outputs for images and other contents, safe for several threads.

T = TypeVar("T")


class EncodedContents:
    """Runs an encoder for contents that are not cached. Thread-safe."""

    def __init__(self, max_bytes: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Cache at most `max_bytes` bytes of embeddings `[tokens, hidden_size]` of a dtype."""
        self.cache = EncoderOutputCache(max_bytes)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._access = LoopAccess()

    def encode(self, content: bytes, encoder: Callable[[bytes], torch.Tensor]) -> EncodedContent:
        """Return the embeddings of a content; see `Engine.encode`.

        Raises:
            RequestError: `content` is not bytes, or `encoder` returned no embeddings.
        """
        if not isinstance(content, bytes):
            raise RequestError(
                f"content must be bytes, not {type(content).__name__}", field="content"
            )
        check_callable("encoder", encoder, "bytes that returns embeddings")
        key = content_key(content, "encoded")
        embeds = self._use(lambda cache: cache.get(key))
        if embeds is None:
            encoded = encoder(content)
            made = check_embeds(
                encoded, self._hidden_size, self._dtype, "the encoder gave", "encoder"
            )
            self._use(lambda cache: cache.put(key, made))
            embeds = made
        return EncodedContent(embeds, key)

    def clear(self) -> None:
        """Drop what is cached."""
        self._use(EncoderOutputCache.clear)

    def _use(self, operation: Callable[[EncoderOutputCache], T]) -> T:
        """Run an operation on the cache, one thread at a time."""
        try:
            self._access.enter("encode")
            return operation(self.cache)
        except BaseException:
            self.cache.clear()  # an interrupt may have left it inconsistent
            raise
        finally:
            self._access.leave()


# The step loop of an engine, safe for several threads, signal handlers and forks.
#
# Any thread may post requests and aborts at any time; the call that runs the loop applies them. One
# call at a time runs the loop (see `access.py`): `step`, a call of `generate` for as many steps as
# it needs, or an operation between two steps. Calls of `generate` share the batch: one of them runs
# the steps for all, and when its own requests have ended another one continues.
#
# If an exception interrupts an operation, the loop is not `intact` any more: it has failed, and
# every later call raises.

MakeGroup = Callable[[str], RequestGroup]

"""Makes the requests of a prompt under an id; raises `RequestError` if it cannot be served."""


class SharedLoop:
    """A `StepLoop` for any number of threads, until it is closed, fails, or the process forks."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop: StepLoop | None = loop
        self._access = LoopAccess()
        self._tickets = Tickets()
        self._failure: BaseException | None = None
        self._ended: EngineClosedError | None = None
        self.forked = False
        """Whether this is a copy in a forked child."""
        call_in_children(self)

    def after_fork(self) -> None:
        """Refuse every use: the threads of the parent do not exist in a child."""
        self.forked = True
        self._ended = EngineForkedError(
            "the engine belongs to the parent of this process, and cannot be used after a fork:"
            " make a new one here, or start processes by spawn"
        )

    @property
    def open_loop(self) -> StepLoop:
        """The loop. Raises `EngineClosedError` or `EngineForkedError`."""
        loop = self._loop  # first: another thread may close it
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert loop is not None
        return loop

    @property
    def healthy(self) -> bool:
        """Whether no operation has failed or was interrupted."""
        loop = self._loop
        if self._failure is not None or loop is None or loop.lost_ranks:
            return False
        # An operation may end between the two checks, which looks like an interrupted one: retry.
        return any(loop.intact or self._access.held for _ in range(8))

    def check_usable(self) -> StepLoop:
        """Return the loop, unless it is closed or failed."""
        loop = self._loop
        if loop is None or self._ended is not None:
            return self.open_loop  # which raises
        if self._failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier ({self._failure!r}): close it and make a new one"
            ) from self._failure
        return loop

    def has_unfinished(self) -> bool:
        """Whether `step` has requests to run or outputs to return."""
        loop = self.open_loop
        return bool(self._tickets) or loop.has_unfinished

    def submit(
        self, make_group: MakeGroup, request_id: str | None, call: GenerateCall | None = None
    ) -> str:
        """Queue the requests of a prompt, and return their id: a new one for None.

        Raises:
            RequestError: from `make_group`, or the id is invalid or in use; nothing was queued.
        """
        loop = self.check_usable()
        ticket = Ticket(call)
        group: RequestGroup | None = None
        try:
            if call is not None:
                call.tickets.append(ticket)
            request_id = self._tickets.reserve(ticket, request_id)
            group = make_group(request_id)
            loop.post_add(group)
            ticket.group = group  # it can be aborted from now on
            self._settle("add_request")
            return request_id
        except BaseException:
            if group is not None:
                loop.post_discard(group)
            self._tickets.release(ticket)
            raise

    def abort(self, request_id: str, reason: AbortReason = "abort") -> bool:
        """End a request; see `Engine.abort`."""
        loop = self.open_loop
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.group is None or ticket.group.finished or ticket.abort_posted:
            return False
        loop.post_abort(ticket.group, reason)
        ticket.abort_posted = True
        self._settle("abort")
        return True

    def pause(self, request_id: str, *, resume: bool = False) -> None:
        """Pause a request, or resume it; see `Engine.pause`."""
        loop = self.check_usable()
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.group is not None:
            (loop.post_resume if resume else loop.post_pause)(ticket.group)

    def _settle(self, name: str) -> None:
        """Apply posted changes, unless another call holds the loop and applies them."""
        if self._failure is not None:
            return
        try:
            if self._access.try_enter(name) and self._ended is None:
                self._change(StepLoop.settle)
        finally:
            self._access.leave()

    def step(self) -> list[RequestOutput]:
        """Run one step; see `Engine.step`."""
        loop = self.check_usable()
        requests = loop.requests
        outputs: list[RequestOutput] = []
        try:
            try:
                part_of_generate = self._access.enter("step")
                if self._ended is not None or self._failure is not None or not loop.intact:
                    self._refuse()  # it changed while this call waited
                try:
                    loop.advance()
                except BaseException as error:
                    self._fail(error)
                    raise
                if self._tickets.calls:
                    self._tickets.route(requests.ready)
                if part_of_generate:  # which returns no outputs of others
                    return outputs
                outputs, requests.ready = requests.ready, outputs
                any_finished, requests.any_finished = requests.any_finished, False
            finally:
                self._access.leave()
            if any_finished:
                self._tickets.hand_over(outputs)
            return outputs
        except BaseException:
            if outputs:  # the next step returns them
                self._tickets.take_back(outputs)
                requests.ready[:0] = outputs
                requests.any_finished = True
            self._access.leave()  # if the first one was interrupted
            raise

    def generate(
        self, prompts: Iterable[MakeGroup], step: Callable[[], object]
    ) -> list[RequestOutput]:
        """Decode prompts to their end and return their last outputs, in order.

        Args:
            prompts: if one raises `RequestError`, that is the `error` of its output.
            step: runs a step, by `SharedLoop.step`.
        """
        self.check_usable()
        self._access.refuse_reentry("generate")
        call = GenerateCall()
        try:
            self._tickets.calls.add(call)
            for make_group in prompts:
                self._submit_for(call, make_group)
            while not call.complete:
                self._drive(call, step)
            outputs = call.outputs()
            for ticket in call.tickets:
                self._tickets.release(ticket)
            self._tickets.calls.discard(call)
            return outputs
        except BaseException:
            self._abandon(call)
            raise

    def _submit_for(self, call: GenerateCall, make_group: MakeGroup) -> None:
        """Queue a prompt of a call; if it cannot be served, deliver an output with the error."""
        try:
            self.submit(make_group, None, call)
        except (RequestError, OverloadedError) as error:
            refused = call.tickets[-1].id
            call.deliver(RequestOutput(refused, [], (), True, error=error))

    def _drive(self, call: GenerateCall, step: Callable[[], object]) -> None:
        """Run steps until the call is complete or another one needs the loop; or wait."""
        self.check_usable()
        try:
            if self._access.claim("generate", call):
                while not (call.complete or self._access.wanted):
                    step()
        finally:
            self._access.leave()

    def _abandon(self, call: GenerateCall) -> None:
        """Abort the requests of a call of `generate`; the next `step` returns their outputs."""
        loop = self.open_loop
        for ticket in call.tickets:
            if ticket.group is not None:
                loop.post_abort(ticket.group)
        self._tickets.calls.discard(call)
        for ticket in call.tickets:
            ticket.call = None
        if self._failure is not None:
            return
        try:
            self._access.enter("generate")
            self._change(StepLoop.settle)
            loop.requests.ready += [output for output in call.done.values() if output.error is None]
            loop.requests.any_finished = True
        finally:
            self._access.leave()

    def score(self, make_group: MakeGroup, forced: Sequence[int]) -> torch.Tensor:
        """Return the logits of a single request; see `Engine.score`."""
        loop = self.check_usable()
        ticket = Ticket()
        logits: list[torch.Tensor] = []
        group: RequestGroup | None = None
        try:
            self._access.claim("score")
            self.run("score", StepLoop.settle)
            if self.has_unfinished():
                raise RequestError("score needs an idle engine: finish or abort its requests first")
            group = make_group(self._tickets.reserve(ticket, None))
            (request,) = group.requests
            loop.post_add(group)
            self.run("score", StepLoop.settle)
            while not group.finished:
                self.run("score", lambda loop: loop.score_step(request, forced, logits))
            if request.error is not None:
                raise request.error
            return torch.stack(logits)
        finally:
            try:
                self._tickets.release(ticket)
                if group is not None and self._failure is None:
                    loop.post_discard(group)
                    self.run("score", StepLoop.settle)
            finally:
                self._access.leave()

    def run(self, name: str, change: Callable[[StepLoop], T]) -> T:
        """Run an operation between two steps, once the loop is free; return its result.

        Raises:
            EngineBusyError: a callback called `name` within a call that holds the loop.
        """
        self.check_usable()  # in a fork the holder of the loop never ends
        try:
            self._access.enter(name)
            return self._change(change, name)
        finally:
            self._access.leave()

    def run_idle(self, name: str, change: Callable[[StepLoop], T]) -> T:
        """As `run`, for an operation that needs an engine without unfinished requests.

        Raises:
            RequestError: there are unfinished requests.
        """

        def checked(loop: StepLoop) -> T:
            loop.settle()
            if self.has_unfinished():
                raise RequestError(
                    f"{name} needs an idle engine: finish or abort its requests first"
                )
            return change(loop)

        return self.run(name, checked)

    def _change(self, change: Callable[[StepLoop], T], name: str | None = None) -> T:
        """Run an operation on the loop, which this call holds."""
        loop = self.check_usable()
        if not loop.intact:
            self._refuse()
        try:
            return change(loop)
        except BaseException as error:
            self._fail(error, name)
            raise

    def _refuse(self) -> None:
        """Raise the error of a loop that is closed or failed."""
        loop = self.check_usable()
        if not loop.intact:
            self._failure = EngineFailedError("an exception interrupted an operation")
        self.check_usable()

    def _fail(self, error: BaseException, name: str | None = None) -> None:
        """Record the failure of an operation; raise `EngineFailedError` for an `Exception`.

        `name` is the operation in the message; None for the current step. The failure of a rank is
        a `RankError`, which is raised as it is.
        """
        loop = self.open_loop
        if loop.intact:
            return
        if loop.group is not None:
            error = loop.group.end(error)
        self._failure = error
        if isinstance(error, RankError):
            raise error
        if isinstance(error, Exception):
            failed = name or f"step {loop.num_steps}"
            raise EngineFailedError(f"{failed} failed: {str(error) or repr(error)}") from error

    def close(self, release_memory: Callable[[StepLoop], None]) -> None:
        """Refuse every later use and free the memory of the engine. Idempotent.

        Waits for the current step of another thread. After an interrupt it can be called again.

        Raises:
            EngineBusyError: a callback called it within a call that holds the loop.
        """
        if self.forked:
            return
        try:
            self._access.enter("close")
            if self._loop is not None:
                self._ended = EngineClosedError("the engine is closed: make a new one")
                release_memory(self._loop)
                # The traceback of a failure holds frames, and those the tensors.
                self._failure = self._loop = None
                self._tickets = Tickets()
        finally:
            self._access.leave()


# The parts of a started engine: their lifetime, and what they report.


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
        )
        if config.user.structured_output:
            self._intake.make_grammars()  # it warns of a tokenizer that cannot have any
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


class Engine(StartedEngine):
    """Decodes batches of requests. Several engines may coexist.

    Create one with `from_pretrained`. Use it as a context manager, or call `close` at the end.

    Threads: `add_request`, `abort`, `stats` and `has_unfinished` may be called at any time by any
    thread, signal handler or callback; they do not wait for a step. Any number of threads may call
    `generate`; their requests share the batch. Call `step` from one thread. Methods that run the
    loop or change it wait for the current step of another thread. `EngineBusyError` is raised by a
    second concurrent `step`, and by a call from within a step that would have to wait for that
    step. In a forked child every call except `close` raises `EngineForkedError`.

    Ctrl-C takes effect at the end of the current step and leaves the engine usable. See
    docs/embedding.md.
    """

    def __new__(cls, *arguments: object, **more: object) -> Self:
        """Refuse a model or a configuration, which `from_pretrained` takes."""
        if more or len(arguments) != 1 or not hasattr(arguments[0], "runner"):
            raise TypeError(
                f"{cls.__name__}() takes no model or configuration: load a model with"
                f" {cls.__name__}.from_pretrained('path/to/checkpoint', EngineConfig(...))"
            )
        return super().__new__(cls)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, config: EngineConfig | None = None, *, progress: bool = False
    ) -> Engine:
        """Load a model and prepare every step.

        Args:
            source: a directory in the Hugging Face layout, a hub id, `preset:NAME` (random
                weights) or `demo`.
            config: the configuration; None for the defaults.
            progress: show progress bars on stderr while loading and preparing, if it is a terminal.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unsupported or inconsistent.
            ConfigError: the device or the model does not support the configuration.
            MemoryBudgetError: the budget is too small for the smallest cache, or memory ran out.
            KernelBuildError: the C++ kernels could not be built.
            KernelSelfTestError: a kernel required by `kernels="native"` failed its self-test, or a
                kernel made the device unusable.
            StepPreparationError: a step could not be compiled or captured.
        """
        check_config("config", config, EngineConfig)
        return cls(start(source, config or EngineConfig(), progress=progress))

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request for a prompt and return the request's id.

        Requests of smaller `priority` are served first, and preempted last. Only requests with the
        same `cache_salt` share the cached blocks of a common prefix. Give each tenant a salt that
        others cannot guess: otherwise the time to first token reveals whether another tenant sent
        the same prefix.

        Raises:
            RequestError: the request is invalid, or can never be served. It was not queued.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        accept = partial(
            self._intake.accept,
            prompt=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._shared.submit(accept, request_id)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestGroup:
        """Check and tokenise a prompt, for a later `queue`. Any thread may call it at any time.

        Raises:
            RequestError: as `add_request`.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        check_type("request_id", request_id, str, "a string")
        return self._intake.accept(request_id, prompt, params, priority, cache_salt)

    def has_compiled(self, structured: StructuredOutput) -> bool:
        """Return whether `prepare` finds the grammar of a request in the cache. For any thread."""
        check_type("structured", structured, StructuredOutput, "a StructuredOutput")
        return self._intake.has_compiled(structured)

    def queue(self, group: RequestGroup) -> None:
        """Queue a prepared request, once.

        Raises:
            RequestError: its id is in use, or it is none that `prepare` returned.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        check_type("group", group, RequestGroup, "a request that `prepare` returned")
        self._shared.submit(lambda _: group, group.id)

    def abort(self, request_id: str, reason: AbortReason = "abort") -> bool:
        """End a request; the next `step` returns its final output, with the reason given.

        Its row and blocks are free when this returns, or from the next step on if another call runs
        the loop. If the current step ends the request, the reason is that of the step.

        Returns False, and does nothing, if there is no unfinished request of this id.

        Raises:
            RequestError: the id is not a string, or the reason is unknown.
        """
        check_type("request_id", request_id, str, "a string")
        check_choice("reason", reason, get_args(AbortReason))
        return self._shared.abort(request_id, reason)

    def pause(self, request_id: str) -> None:
        """Take the row and the blocks of a request before the next step, until `resume`.

        It keeps its tokens and goes on with the same ones. Does nothing if there is no unfinished
        request of this id.
        """
        self._shared.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Let a paused request wait for a row again. Does nothing for others."""
        self._shared.pause(request_id, resume=True)

    def has_unfinished(self) -> bool:
        """Whether `step` has requests to run or outputs to return."""
        return self._shared.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs that changed since the last call.

        The next call returns outputs that an interrupt withheld. If another thread is in
        `generate`, the two calls alternate, and all requests share the steps of both.

        Raises:
            EngineBusyError: another thread is in `step`, or a signal handler or a callback called
                it within a step. Nothing has changed.
            EngineFailedError: the step failed. All unfinished requests are lost, and the engine
                cannot be used any more.
            EngineClosedError: the engine is closed.
        """
        return self._shared.step()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode prompts to their end and return their outputs, in order.

        Args:
            prompts: one prompt (see `Prompt`), or a sequence of prompts. A list of integers is one
                prompt of token ids.
            params: one for all, or one for each prompt.

        If one of several prompts cannot be served, the others are not affected: its output has no
        completions, `finish_reason` `error`, and the `RequestError` in `error`, and a warning
        counts such prompts. A single prompt raises.

        Several threads may call it; one of them runs the steps for all. An exception such as
        `KeyboardInterrupt` ends the call and aborts its requests; the next `step` returns their
        outputs.

        Raises:
            RequestError: the only prompt cannot be served; `params` has another length than
                `prompts`; or `prompts` is not a sequence.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        batch = cast("list[Prompt]", plain_batch(prompts, (str, PromptEmbeds, ChatPrompt)))
        accept = self._intake.accept
        outputs = self._shared.generate(
            [
                partial(accept, prompt=prompt, params=own)
                for prompt, own in zip(batch, _one_each(params, len(batch)), strict=True)
            ],
            self.step,
        )
        refused = [output.error for output in outputs if isinstance(output.error, RequestError)]
        if refused and len(batch) == 1:
            raise refused[0]
        if refused:
            warnings.warn(
                f"{len(refused)} of {len(batch)} prompts were refused, see RequestOutput.error;"
                f" the first: {refused[0]}",
                stacklevel=2,
            )
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Decode the reply to a conversation, or to each of a list; return outputs in order.

        The checkpoint's chat template renders the messages to a prompt. To stream, give a
        `ChatPrompt` to `add_request`.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations.
            params: one for all, or one for each conversation.
            tools: JSON schemas of functions that the model may call.
            documents: texts for templates that support them.
            add_generation_prompt: end the prompt with the header of an assistant message. None:
                True, unless the last message is continued.
            continue_final_message: let the model continue the last message.
            chat_template: the name of one of the checkpoint's templates.
            template_kwargs: additional variables for the template.

        Raises:
            RequestError: as `generate`; a conversation that cannot be rendered counts as a prompt
                that cannot be served.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        check_type("continue_final_message", continue_final_message, bool | str, "a bool or a str")
        check_type("template_kwargs", template_kwargs, Mapping | None, "a mapping or None")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        prompts = chat_prompts(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs or {},
        )
        return self.generate(prompts, params)

    def encode(self, content: bytes, encoder: Callable[[bytes], torch.Tensor]) -> EncodedContent:
        """Return the embeddings of a content, for the spans of a `PromptEmbeds`.

        They are cached by content in `encoder_cache_bytes` of host memory. The encoder runs only
        for contents that are not cached, in the calling thread. Other threads can run steps
        meanwhile. The cache does not distinguish encoders, so use one encoder per engine.

        Args:
            content: the bytes of an image, for instance.
            encoder: returns embeddings `[tokens, hidden_size]`, floating point, on any device.

        Raises:
            RequestError: `content` is not bytes, or the encoder did not return embeddings of this
                shape that are finite in the model's dtype.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        return self._encoded.encode(content, encoder)

    def score(self, token_ids: Sequence[int], prompt_len: int = 1) -> torch.Tensor:
        """Return the logits under teacher forcing, float32 `[len(token_ids) - prompt_len + 1, V]`.

        V: vocabulary size. The first `prompt_len` tokens are prefilled. Each further token replaces
        the sampled token of a decode step: row i of the result has the logits after token
        `prompt_len - 1 + i`. The steps are the same as for requests.

        Raises:
            RequestError: as `add_request`; `prompt_len` is not from 1 to `len(token_ids)`; or
                other requests are unfinished.
            NonFiniteLogitsError: a row of logits holds NaN or +inf, or nothing but -inf.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        token_ids = self._intake.check_token_ids(token_ids)
        if not token_ids:
            raise RequestError("token_ids is empty: give at least one token", field="token_ids")
        prompt_len = check_integer(
            "prompt_len", prompt_len, 1, len(token_ids), ", the tokens given"
        )
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{len(token_ids)} tokens to score, but sequences have at most"
                f" {self.max_model_len}, one predicted token included",
                field="token_ids",
                code="context_length_exceeded",
            )
        forced = token_ids[prompt_len:]
        # Greedy steps of a tensor-parallel group do not gather the logits of all ranks.
        logprobs = None if self.config.user.tensor_parallel == 1 else 0
        params = SamplingParams(
            max_tokens=len(forced) + 1, temperature=0.0, ignore_eos=True, logprobs=logprobs
        ).resolved()
        accept = partial(self._intake.accept, prompt=token_ids[:prompt_len], params=params)
        return self._shared.score(accept, forced)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts."""
    if params is None or issubclass(type(params), SamplingParams):
        return [cast("SamplingParams | None", params) or SamplingParams()] * count
    if not issubclass(type(params), Sequence):
        raise RequestError(
            f"params must be SamplingParams or a sequence of them, not {type_name(params)}",
            field="params",
        )
    each = cast("Sequence[SamplingParams]", params)
    if len(each) != count:
        raise RequestError(
            f"{count} prompts, but {len(each)} SamplingParams: give one for all, or one for each"
            " prompt",
            field="params",
        )
    return each
