"""The synchronous engine, the public interface: requests in, outputs out.

`StepLoop` runs the steps (see `loop.py`); `SharedLoop` makes it safe for several threads.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from ...cache.memory.handler import MemoryPlan
from ...profiling.timeline import Timeline
from ..config import EngineConfig
from ..errors import RequestError
from ..loading.chat_template import ChatPrompt, Message, chat_prompts
from ..loading.tokenizer import TextTokenizer
from ..models.decoder import Decoder
from ..prompt_embeds import EncodedContent, PromptEmbeds
from ..prompt_ids import plain_batch, type_name
from ..request import AbortReason, RequestGroup
from ..sampling_params import SamplingParams
from .calibration import calibrated_step_budget
from .encoded_contents import EncodedContents
from .engine_load import EngineLoad
from .engine_metrics import EngineCounters, EngineGauges
from .engine_parts import EngineParts
from .engine_stats import engine_stats
from .intake import Intake, Prompt
from .loop import StepLoop
from .request_output import RequestOutput
from .shared_loop import SharedLoop
from .startup import make_loop, start

__all__ = ["Engine"]


class Engine:
    """Decodes batches of requests. Several engines may coexist.

    Make one with `from_pretrained`; use it as a context manager, or call `close` at the end.

    Threads: `add_request`, `abort`, `stats` and `has_unfinished` may be called at any time by any
    thread, signal handler or callback; they do not wait for a step. `generate` may be called by any
    number of threads, whose requests share the batch. `step` is for one thread. The other methods
    wait for the end of the current step of any thread. A call that would have to wait for its own
    caller, and a `step` while another thread is in `step`, raise `EngineBusyError`. In a forked
    child every call but `close` raises `EngineForkedError`.

    Ctrl-C takes effect at the end of the current step and leaves the engine usable. See
    docs/embedding.md.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Take the parts that `startup.start` made."""
        self.config = parts.config
        self.model_config = parts.model.config
        self._parts: EngineParts | None = parts
        config = parts.config
        self.max_model_len = config.max_model_len
        """Most tokens of one sequence, prompt and output."""
        self._step_budget = calibrated_step_budget(parts.runner, parts.groups, config)
        self._shared = SharedLoop(make_loop(parts, self._step_budget))
        self._intake = Intake(
            parts.model.config,
            parts.tokenizer,
            longest_sequence=self.max_model_len,
            seed=config.seed,
            prefix_block_size=config.block_size if config.prefix_cache else None,
            embeds_dtype=config.dtype if config.prompt_embeds else None,
        )
        self._encoded = EncodedContents(
            config.encoder_cache_bytes, parts.model.config.hidden_size, config.dtype
        )
        if config.freeze_gc:
            gc.collect()  # garbage that is frozen is never freed
            gc.freeze()

    @classmethod
    def from_pretrained(
        cls, source: str | Path, config: EngineConfig | None = None, *, progress: bool = False
    ) -> Engine:
        """Load a model and prepare every step.

        Args:
            source: a directory in the Hugging Face layout, a hub id, `preset:NAME` (random
                weights) or `demo`.
            config: the configuration; None for the defaults.
            progress: show bars on stderr while loading and preparing (if it is a terminal).

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unsupported or inconsistent.
            ConfigError: the configuration cannot work on this device or with this model.
            MemoryBudgetError: the budget has no room for the smallest cache.
            StepPreparationError: a step could not be compiled or captured.
        """
        return cls(start(source, config or EngineConfig(), progress=progress))

    def __enter__(self) -> Engine:
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
        if self._parts.model.stack is not None:
            self._parts.model.stack.close()
        if self._parts.runner.host_arena is not None:
            self._parts.runner.host_arena.close()
        self._parts = None
        self._encoded.cache.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt, text or token ids, and return its id.

        Requests of smaller `priority` are served first, and preempted last. Only requests with the
        same `cache_salt` share the cached blocks of a common beginning. Give each tenant a salt
        that others cannot guess: otherwise the time of a first token reveals whether a prompt was
        sent before.

        Raises:
            RequestError: the request can never be served; it was not queued.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        _check_priority(priority)
        return self._shared.submit(
            partial(
                self._intake.accept,
                prompt=prompt,
                params=SamplingParams() if params is None else params,
                priority=priority,
                cache_salt=cache_salt,
            ),
            request_id,
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
        """Check and tokenise a prompt, for a later `queue`. Any thread may call it at any time.

        Raises:
            RequestError: as `add_request`.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        _check_priority(priority)
        own = SamplingParams() if params is None else params
        return self._intake.accept(request_id, prompt, own, priority, cache_salt)

    def queue(self, group: RequestGroup) -> None:
        """Queue a prepared request, once.

        Raises:
            RequestError: its id is in use.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.submit(lambda _: group, group.id)

    @property
    def load(self) -> EngineLoad:
        """How many rows are taken. Read it in the thread that runs the steps."""
        loop = self._loop
        scheduler = loop.scheduler
        return EngineLoad(
            scheduler.max_num_seqs,
            scheduler.num_running,
            scheduler.num_waiting + loop.num_posted,
        )

    def abort(self, request_id: str, reason: AbortReason = "abort") -> bool:
        """End a request; the next `step` returns its final output, with the reason given.

        Its row and blocks are free when this returns, or from the next step on if another call runs
        the loop. If the current step ends the request, the reason is that of the step.

        Returns False, and does nothing, if there is no unfinished request of this id.
        """
        return self._shared.abort(request_id, reason)

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
            prompts: a text, or a sequence of texts and lists of token ids (see `Prompt`).
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
                partial(accept, prompt=prompt, params=own, priority=0)
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
        """Decode the answer to a conversation, or to each of a list; return outputs in order.

        The checkpoint's chat template renders the messages to a prompt. To stream, give a
        `ChatPrompt` to `add_request`.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations.
            params: one for all, or one for each conversation.
            tools: JSON schemas of functions that the model may call.
            documents: texts for templates that support them.
            add_generation_prompt: end the prompt with the beginning of an assistant's message;
                None: unless the last message is continued.
            continue_final_message: let the model continue the last message.
            chat_template: the name of one of the checkpoint's templates.
            template_kwargs: more variables of the template.

        Raises:
            RequestError: as `generate`; a conversation that cannot be rendered counts as a prompt
                that cannot be served.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
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

        They are cached by content in `encoder_cache_bytes` of host memory: the encoder runs only
        for contents that are not cached. Use one encoder for one engine. It runs in the calling
        thread, while other threads may run steps.

        Args:
            content: the bytes of an image, for instance.
            encoder: returns embeddings `[tokens, hidden_size]`, floating point, on any device.

        Raises:
            RequestError: `content` is not bytes, or the encoder returned something else, or values
                that the model's dtype cannot represent.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        return self._encoded.encode(content, encoder)

    def reset_prefix_cache(self) -> None:
        """Drop the prefix cache: the next requests compute their whole prompts.

        Running requests keep their blocks, which are no longer shared. For measuring cold starts,
        or after weights changed.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.run("reset_prefix_cache", StepLoop.forget_contents)

    def score(self, token_ids: Sequence[int], prompt_len: int = 1) -> torch.Tensor:
        """Return the logits under teacher forcing, float32 `[len(token_ids) - prompt_len + 1, V]`.

        The first `prompt_len` tokens are prefilled. Decode steps take the others one by one, each
        in the place of the sampled token: row i follows token `prompt_len - 1 + i`. The steps are
        those that serve requests.

        Raises:
            RequestError: as `add_request`; `prompt_len` is not from 1 to `len(token_ids)`; or
                other requests are unfinished.
            NonFiniteLogitsError: a row of logits holds NaN or +inf, or nothing but -inf.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine is closed, or a step failed.
        """
        self._shared.check_usable()
        token_ids = self._intake.check_token_ids(token_ids)
        if not 1 <= prompt_len <= len(token_ids):
            raise RequestError(
                f"prompt_len must be from 1 to the {len(token_ids)} tokens given, not {prompt_len}"
            )
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{len(token_ids)} tokens to score, but sequences have at most"
                f" {self.max_model_len}, one predicted token included"
            )
        forced = token_ids[prompt_len:]
        params = SamplingParams(max_tokens=len(forced) + 1, temperature=0.0, ignore_eos=True)
        accept = partial(
            self._intake.accept, prompt=token_ids[:prompt_len], params=params, priority=0
        )
        return self._shared.score(accept, forced)

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

        On CUDA two timed events surround each step. They take a few microseconds on the device, so
        steps are timed only here. On a CPU all steps are timed anyway. Blocks may be nested.

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
    def decoder(self) -> Decoder:
        """The loaded model, its weights stored as the kernels need them."""
        return self._open_parts().model

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan that set the size of the cache."""
        return self._open_parts().plan

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of the weights that a decode step reads."""
        return self._open_parts().model.weight_bytes_per_step

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        return sum(group.spec.slot_bytes * len(group.layers) for group in self._open_parts().groups)

    def kv_bytes_read(self, context: int) -> int:
        """Bytes of the cache that a row of `context` tokens reads in a decode step."""
        return sum(group.bytes_read(context) for group in self._open_parts().groups)

    def positions_read(self, context: int) -> int:
        """Tokens that a row of `context` tokens attends to, summed over the layers."""
        return sum(group.positions_read(context) for group in self._open_parts().groups)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes, as plain numbers and strings.

        `threads` is the number of threads of the native operators on a CPU, None if there are none.
        `memory` has planned and measured bytes of each term, with a note where a measurement is
        None; `memory_phases` the memory of each phase of the start, `prepared` the cost of the
        prepared steps. `start` has the seconds of each phase, whether kernels and compiled code
        came from a cache, and how many Triton kernels were compiled ahead, in how many threads.
        `blocks` and `cache` count blocks that are free, cached, found, copied and swapped;
        `fallbacks` launches without a prepared step. `steps` counts launches,
        `multi_step_launches` those that decoded several tokens of each row, `non_finite` requests
        that ended with `NonFiniteLogitsError`. `collector` counts the runs of Python's garbage
        collector since the engine was made, and their seconds. `step_budget` (None without
        `max_itl_ms`) compares the times of mixed prefill and decode steps with their predictions.
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

    def counters(self) -> EngineCounters:
        """Return what it has done. Takes microseconds; any thread may call it at any time."""
        return EngineCounters.of(self._loop)

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


def _check_priority(priority: int) -> None:
    if not isinstance(priority, int):
        raise RequestError(f"priority must be an integer, not {priority!r}")


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts."""
    if params is None or issubclass(type(params), SamplingParams):
        return [cast("SamplingParams | None", params) or SamplingParams()] * count
    if not issubclass(type(params), Sequence):
        raise RequestError(
            f"params must be a SamplingParams or a sequence of them, not a {type_name(params)}"
        )
    each = cast("Sequence[SamplingParams]", params)
    if len(each) != count:
        raise RequestError(
            f"{count} prompts, but {len(each)} sampling parameters: give one, or one for each"
        )
    return each
