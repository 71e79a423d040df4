"""The public face: requests in, outputs out.

The work is done by `StepLoop` (see `loop.py`); `SharedLoop` lets several threads use it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from ...cache.encoder_outputs import EncoderOutputCache, content_key
from ...cache.kv_cache import KVCache
from ...cache.memory.handler import MemoryPlan
from ...profiling.timeline import Timeline
from ..config import EngineConfig
from ..errors import RequestError
from ..loading.chat_template import ChatPrompt, Message, is_batch
from ..loading.tokenizer import TextTokenizer
from ..models.decoder import Decoder
from ..prompt_embeds import EncodedContent, PromptEmbeds, check_embeds
from ..prompt_ids import plain_batch, type_name
from ..sampling_params import SamplingParams
from ..scheduling.scheduler import Scheduler
from .access import LoopAccess
from .calibration import calibrated_step_budget, preemption_policy
from .engine_stats import engine_stats
from .intake import Intake, Prompt
from .loop import StepLoop
from .request_output import RequestOutput
from .shared_loop import SharedLoop
from .startup import EngineParts, start

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """Decodes batches of requests. Several engines may coexist.

    Made by `from_pretrained`; used as a context manager, or ended with `close`.

    Threads: `add_request`, `abort`, `stats` and `has_unfinished` may be called by any thread at any
    time, and by signal handlers and callbacks; they do not wait for a step. `generate` may be
    called by any number of threads: their requests share the batch. `step` is for one thread. The
    other methods wait until the step under way, of whatever thread, has ended. What would have to
    wait for its own caller, and a `step` beside one of another thread, raises `EngineBusyError`.
    After a fork the child gets `EngineForkedError`.

    Ctrl-C takes effect at the end of the step under way and leaves an engine that serves on. See
    docs/embedding.md.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Run over parts that `startup.start` made."""
        self.config = parts.config
        self.model_config = parts.model.config
        self._parts: EngineParts | None = parts
        config = parts.config
        host = parts.runner.host_arena
        cache = KVCache(
            parts.groups,
            parts.plan.num_blocks,
            config.block_size,
            chunk=config.prefill_chunk,
            host_blocks=0 if host is None else host.num_blocks,
        )
        self.max_model_len = config.max_model_len
        """Tokens of the longest sequence that can be served, prompt and output."""
        self._step_budget = None
        if config.max_itl_ms is not None:
            self._step_budget = calibrated_step_budget(
                parts.runner, parts.groups, config.max_itl_ms, self.max_model_len
            )
        scheduler = Scheduler(
            cache,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=parts.plan.max_batch_tokens,
            prefill_chunk=config.prefill_chunk,
            max_prefill_rows=config.max_prefill_rows,
            preemption=preemption_policy(parts.runner, config.preemption),
            step_budget=self._step_budget,
            steps_per_launch=config.steps_per_launch,
        )
        self._shared = SharedLoop(
            StepLoop(
                scheduler,
                parts.runner,
                in_flight=int(config.is_async_device),
                step_budget=self._step_budget,
            )
        )
        self._intake = Intake(
            parts.model.config,
            parts.tokenizer,
            longest_sequence=self.max_model_len,
            seed=config.seed,
            prefix_block_size=config.block_size if config.prefix_cache else None,
            embeds_dtype=config.dtype if config.prompt_embeds else None,
        )
        self._encoded = EncoderOutputCache(config.encoder_cache_bytes)
        self._encoding = LoopAccess()
        if config.freeze_gc:
            gc.collect()  # or what is garbage now would stay for ever
            gc.freeze()

    @classmethod
    def from_pretrained(
        cls, source: str | Path, config: EngineConfig | None = None, *, progress: bool = False
    ) -> Engine:
        """Load a model and make every step ready.

        Args:
            source: a directory in the Hugging Face layout, a hub id, `preset:NAME` (random
                weights) or `demo`.
            config: how to run it.
            progress: show bars on stderr while loading and preparing (if it is a terminal).

        Raises:
            CheckpointError: the checkpoint is missing, damaged, unknown or contradicts itself.
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
        """Give back all memory. What has not finished ends without an output. Idempotent.

        Waits for a step of another thread; calls of `generate` there raise `EngineClosedError`. In
        a forked child it does nothing.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
        """
        self._shared.close(self._release_memory)

    def _release_memory(self, loop: StepLoop) -> None:
        """Let go of everything. May be repeated if it was interrupted."""
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
        self._encoded.clear()
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

        Requests of smaller `priority` are served first, and preempted last. Only requests of the
        same `cache_salt` share what the cache holds of their common beginning: give each tenant one
        that the others cannot guess, or they can tell from the time of a first token whether a
        prompt was asked before.

        Raises:
            RequestError: the request can never be served; nothing was queued.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._shared.check_usable()
        if not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {priority!r}")
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

    def abort(self, request_id: str) -> bool:
        """End a request; its final output, with reason `abort`, comes from the next `step`.

        Its row and blocks are free when this returns, or from the next step on if another call runs
        the loop. If the step under way ends the request, its reason is that of the step.

        Returns False, and does nothing, if no such request is unfinished.
        """
        return self._shared.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return self._shared.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the requests that changed since the last call.

        Outputs that an interrupt kept from being returned are returned by the next call. While
        another thread is in `generate`, the two take turns: all requests share the steps of both.

        Raises:
            EngineBusyError: another thread is in `step`, or a signal handler or a callback called
                it within a step. Nothing was changed.
            EngineFailedError: the step failed. Every unfinished request is lost, and the engine
                serves nothing more.
            EngineClosedError: the engine serves nothing more.
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

        One of several prompts that cannot be served does not touch the others: its output has no
        completions, `finish_reason` `error`, and the `RequestError` in `error`. A warning counts
        such prompts. A single one raises.

        Several threads may call it: one of them runs the steps, for all of them. An exception such
        as `KeyboardInterrupt` ends the call and aborts its requests; the next `step` reports them.

        Raises:
            RequestError: the only prompt cannot be served; as many `params` as prompts were
                expected; `prompts` is no sequence.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._shared.check_usable()
        batch = cast("list[Prompt]", plain_batch(prompts, (str, PromptEmbeds, ChatPrompt)))
        if params is None or issubclass(type(params), SamplingParams):
            params = [cast("SamplingParams | None", params) or SamplingParams()] * len(batch)
        elif not issubclass(type(params), Sequence):
            raise RequestError(
                f"params must be a SamplingParams or a sequence of them, not a {type_name(params)}"
            )
        params = cast("Sequence[SamplingParams]", params)
        if len(params) != len(batch):
            raise RequestError(f"{len(batch)} prompts, but {len(params)} sampling parameters")
        accept = self._intake.accept
        outputs = self._shared.generate(
            [
                partial(accept, prompt=prompt, params=own, priority=0)
                for prompt, own in zip(batch, params, strict=True)
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
        """Answer a conversation, or each of a list of them; return the outputs, in order.

        The prompt is what the checkpoint's chat template makes of the messages. To stream, give a
        `ChatPrompt` to `add_request`.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations.
            params: one for all, or one for each conversation.
            tools: JSON schemas of functions that the model may call.
            documents: texts for templates that know them.
            add_generation_prompt: end the prompt with the beginning of an assistant's message;
                None: unless the last message is continued.
            continue_final_message: let the model go on with the last message.
            chat_template: the name of one of the checkpoint's templates.
            template_kwargs: more variables of the template.

        Raises:
            RequestError: as `generate`; for a conversation that cannot be rendered, as for a prompt
                that cannot be served.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        prompts = [
            ChatPrompt(
                cast("Sequence[Message]", conversation),
                tools,
                documents,
                add_generation_prompt,
                continue_final_message,
                chat_template,
                template_kwargs or {},
            )
            for conversation in (messages if is_batch(messages) else [messages])
        ]
        return self.generate(prompts, params)

    def encode(self, content: bytes, encoder: Callable[[bytes], torch.Tensor]) -> EncodedContent:
        """Return what an encoder makes of a content, for the spans of a `PromptEmbeds`.

        What it made is kept in `encoder_cache_bytes` of host memory, by content: the encoder runs
        again only for what has been pushed out since. One engine has one encoder. It runs in the
        calling thread, beside the steps of others.

        Args:
            content: the bytes of an image, for instance.
            encoder: gives embeddings `[tokens, hidden_size]`, floating point, on any device.

        Raises:
            RequestError: `content` is not bytes, or the encoder gave no tensor of that kind, or one
                that the model's dtype cannot hold.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._shared.check_usable()
        if not isinstance(content, bytes):
            raise RequestError(f"content must be bytes, not {type(content).__name__}")
        key = content_key(content, "encoded")
        embeds = self._with_encoded(lambda cache: cache.get(key))
        if embeds is None:
            hidden = self.model_config.hidden_size
            made = check_embeds(encoder(content), hidden, self.config.dtype, "the encoder gave")
            self._with_encoded(lambda cache: cache.put(key, made))
            embeds = made
        return EncodedContent(embeds, key)

    def _with_encoded(self, use: Callable[[EncoderOutputCache], T]) -> T:
        """Use the cache of encoder outputs, one thread at a time."""
        try:
            self._encoding.enter("encode")
            return use(self._encoded)
        except BaseException:
            self._encoded.clear()  # it may have been cut short
            raise
        finally:
            self._encoding.leave()

    def reset_prefix_cache(self) -> None:
        """Forget what requests could share: the next ones compute their prompts from the start.

        Requests under way keep what they hold, and share none of it any more. For measuring cold
        starts, or after weights changed.

        Raises:
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._shared.run("reset_prefix_cache", StepLoop.forget_contents)

    def score(self, token_ids: Sequence[int], prompt_len: int = 1) -> torch.Tensor:
        """Return the logits under teacher forcing, float32 `[len(token_ids) - prompt_len + 1, V]`.

        The first `prompt_len` tokens are prefilled, the others fed one by one through decode
        steps, each in the place of the token that was sampled: row i follows token
        `prompt_len - 1 + i`. The very steps that serve requests compute it.

        Raises:
            RequestError: as `add_request`; `prompt_len` is not from 1 to `len(token_ids)`; or
                other requests are unfinished.
            NonFiniteLogitsError: a row of logits holds NaN or +inf, or nothing but -inf.
            EngineBusyError: called by a signal handler or a callback within a step.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._shared.check_usable()
        token_ids = self._intake.check_token_ids(token_ids)
        if not 1 <= prompt_len <= len(token_ids):
            raise RequestError(
                f"prompt_len must be from 1 to the {len(token_ids)} tokens given, not {prompt_len}"
            )
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{len(token_ids)} tokens do not fit a sequence of {self.max_model_len}"
            )
        forced = token_ids[prompt_len:]
        params = SamplingParams(max_tokens=len(forced) + 1, temperature=0.0, ignore_eos=True)
        accept = partial(
            self._intake.accept, prompt=token_ids[:prompt_len], params=params, priority=0
        )
        return self._shared.score(accept, forced)

    def timeline(self) -> Timeline:
        """Return a live view of where the time of the last steps went.

        `device_ns` of its records is None on CUDA for steps outside of `device_timing`.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return self._loop.timeline

    @contextmanager
    def device_timing(self) -> Iterator[Timeline]:
        """Time the steps that are launched in this block on the device; yield the timeline.

        On CUDA two timed events surround each step, which take a few microseconds on the device, so
        steps are timed on request only. On a CPU all steps are timed anyway. Blocks may be nested.

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
        """The checkpoint's tokenizer, None for one without `tokenizer.json` and for presets."""
        return self._open_parts().tokenizer

    @property
    def decoder(self) -> Decoder:
        """The loaded model: its weights as the kernels store them."""
        return self._open_parts().model

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan that the cache was sized by."""
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

        `threads` is how many threads run the native operators of a CPU (None: there are none).
        `memory` holds planned and measured bytes of each term (measured None has a note that says
        why), `memory_phases` what the start-up took, `prepared` what the steps cost then. `start`
        has the seconds of each phase, whether the kernels and compiled code were found in a cache,
        and how many Triton kernels were compiled ahead of the steps, in how many threads. `blocks`
        and `cache` tell what is free, cached, found at admission, copied and swapped; `fallbacks`
        how often a launch found no prepared step. `steps` counts launches, `multi_step_launches`
        those that decoded several tokens of each row, `non_finite` requests that ended with
        `NonFiniteLogitsError`. `collector` counts the runs of Python's garbage collector since the
        engine was made, and their seconds. `step_budget` (None without `max_itl_ms`) compares the
        times of mixed prefill and decode steps with their predictions.
        """
        return engine_stats(
            self._open_parts(),
            self._loop,
            self._encoded,
            self._step_budget,
            max_model_len=self.max_model_len,
            healthy=self._shared.healthy,
        )

    def check_integrity(self) -> None:
        """Assert every invariant that can be checked between two steps. For tests."""
        self._shared.run("check_integrity", StepLoop.check_integrity)

    @property
    def _loop(self) -> StepLoop:
        return self._shared.open_loop

    def _open_parts(self) -> EngineParts:
        _ = self._loop
        assert self._parts is not None
        return self._parts
