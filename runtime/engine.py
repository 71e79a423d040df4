"""The public face: requests in, outputs out. The work is done by `StepLoop` (see `loop.py`)."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from ..cache.encoder_outputs import EncoderOutputCache, content_key
from ..cache.kv_cache import KVCache
from ..cache.memory import MemoryPlan
from ..profiling.timeline import Timeline
from .calibration import calibrated_step_budget, preemption_policy
from .chat_template import ChatPrompt, Message, is_batch
from .config import EngineConfig
from .engine_stats import engine_stats
from .errors import EngineClosedError, EngineFailedError, RequestError
from .intake import Intake, Prompt
from .loop import StepLoop
from .models.decoder import Decoder
from .prompt_embeds import EncodedContent, PromptEmbeds, check_embeds
from .prompt_ids import plain_batch, type_name
from .request_output import RequestOutput
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .startup import EngineParts, start
from .tokenizer import TextTokenizer

__all__ = ["Engine"]


class Engine:
    """Decodes batches of requests. One thread at a time may use it; several engines may coexist.

    Made by `from_pretrained`; used as a context manager, or ended with `close`.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Run over parts that `startup.start` made."""
        self.config = parts.config
        self.model_config = parts.model.config
        self._parts: EngineParts | None = parts
        self._failure: BaseException | None = None
        self._next_id = 0
        self._unclaimed: list[RequestOutput] = []  # of other requests, seen by `generate`
        user = parts.config.user
        host = parts.runner.host_arena
        cache = KVCache(
            parts.groups,
            parts.plan.num_blocks,
            user.block_size,
            chunk=min(user.prefill_chunk, parts.plan.max_batch_tokens),
            host_blocks=0 if host is None else host.num_blocks,
        )
        self.max_model_len = parts.config.max_model_len
        """Tokens of the longest sequence that can be served, prompt and output."""
        self._step_budget = None
        if user.max_itl_ms is not None:
            self._step_budget = calibrated_step_budget(
                parts.runner, parts.groups, user.max_itl_ms, self.max_model_len
            )
        self._open_loop: StepLoop | None = StepLoop(
            Scheduler(
                cache,
                max_rows=user.max_rows,
                max_batch_tokens=parts.plan.max_batch_tokens,
                prefill_chunk=user.prefill_chunk,
                max_prefill_rows=parts.runner.max_prefill_rows,
                preemption=preemption_policy(parts.runner, user.preemption),
                step_budget=self._step_budget,
                steps_per_launch=user.steps_per_launch,
            ),
            parts.runner,
            in_flight=int(parts.config.beside_host),
            step_budget=self._step_budget,
        )
        self._intake = Intake(
            parts.model.config,
            parts.tokenizer,
            longest_sequence=self.max_model_len,
            seed=user.seed,
            prefix_block_size=user.block_size if user.prefix_cache else None,
            embeds_dtype=parts.config.dtype if user.prompt_embeds else None,
        )
        self._encoded = EncoderOutputCache(user.encoder_cache_bytes)
        if user.freeze_gc:
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
        """Give back all memory. What has not finished ends without an output. Idempotent."""
        if self._parts is None:
            return
        device = self.config.device
        if device.type == "cuda" and self._failure is None:
            torch.cuda.synchronize(device)  # launched steps still write to the arena
        host_arena = self._parts.runner.host_arena
        self._loop.close()
        if self._parts.model.stack is not None:
            self._parts.model.stack.close()
        if host_arena is not None:
            host_arena.close()
        # The traceback of a failure holds frames, and those the tensors.
        self._parts = self._open_loop = self._failure = None
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
        self._check_usable()
        if request_id is None:
            request_id = self._fresh_id()
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, not {request_id!r}")
        if request_id in self._loop.groups:
            raise RequestError(
                f"request_id {request_id!r} is already in use: choose another, or leave it out"
            )
        if not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, not {priority!r}")
        self._loop.add(
            self._intake.accept(
                request_id,
                prompt,
                SamplingParams() if params is None else params,
                priority,
                cache_salt,
            )
        )
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request now; its final output, with reason `abort`, comes from the next `step`.

        Returns False, and does nothing, if no such request is unfinished.
        """
        self._open_parts()
        group = self._loop.groups.get(request_id)
        if group is None or group.finished:
            return False
        self._loop.abort(group)
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to report."""
        self._open_parts()
        return bool(self._unclaimed) or self._loop.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step, and return the requests that changed since the last call.

        Raises:
            EngineFailedError: the launch failed. Every unfinished request is lost, and the engine
                serves nothing more.
            EngineClosedError: the engine serves nothing more.
        """
        self._check_usable()
        with self._failing():
            outputs = self._loop.step()
        if self._unclaimed:
            outputs, self._unclaimed = self._unclaimed + outputs, []
        return outputs

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

        Raises:
            RequestError: the only prompt cannot be served; as many `params` as prompts were
                expected; `prompts` is no sequence.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._check_usable()
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
        ids = [self._fresh_id() for _ in batch]
        done: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            for request_id, prompt, own in zip(ids, batch, params, strict=True):
                try:
                    self.add_request(prompt, own, request_id)
                except RequestError as error:
                    if len(batch) == 1:
                        raise
                    done[request_id] = RequestOutput(request_id, [], (), True, error=error)
            refused = [output.error for output in done.values()]
            ours = set(ids)
            while len(done) < len(ids):
                for output in self.step():
                    if output.request_id not in ours:
                        others.append(output)
                    elif output.finished:
                        done[output.request_id] = output
        finally:
            self._unclaimed += others
            if len(done) < len(ids) and self._failure is None:  # interrupted
                for request_id in ids:
                    self.abort(request_id)
        if refused:
            warnings.warn(
                f"{len(refused)} of {len(batch)} prompts were refused, see RequestOutput.error;"
                f" the first: {refused[0]}",
                stacklevel=2,
            )
        return [done[request_id] for request_id in ids]

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
        again only for what has been pushed out since. One engine has one encoder.

        Args:
            content: the bytes of an image, for instance.
            encoder: gives embeddings `[tokens, hidden_size]`, floating point, on any device.

        Raises:
            RequestError: `content` is not bytes, or the encoder gave no tensor of that kind, or one
                that the model's dtype cannot hold.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._check_usable()
        if not isinstance(content, bytes):
            raise RequestError(f"content must be bytes, not {type(content).__name__}")
        key = content_key(content, "encoded")
        embeds = self._encoded.get(key)
        if embeds is None:
            hidden = self.model_config.hidden_size
            embeds = check_embeds(encoder(content), hidden, self.config.dtype, "the encoder gave")
            self._encoded.put(key, embeds)
        return EncodedContent(embeds, key)

    def reset_prefix_cache(self) -> None:
        """Forget what requests could share: the next ones compute their prompts from the start.

        Requests under way keep what they hold, and share none of it any more. For measuring cold
        starts, or after weights changed.

        Raises:
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._check_usable()
        self._loop.scheduler.forget_contents()

    def score(self, token_ids: Sequence[int], prompt_len: int = 1) -> torch.Tensor:
        """Return the logits under teacher forcing, float32 `[len(token_ids) - prompt_len + 1, V]`.

        The first `prompt_len` tokens are prefilled, the others fed one by one through decode
        steps, each in the place of the token that was sampled: row i follows token
        `prompt_len - 1 + i`. The very steps that serve requests compute it.

        Raises:
            RequestError: as `add_request`; `prompt_len` is not from 1 to `len(token_ids)`; or
                other requests are unfinished.
            NonFiniteLogitsError: a row of logits holds NaN or +inf, or nothing but -inf.
            EngineClosedError, EngineFailedError: the engine serves nothing more.
        """
        self._check_usable()
        if self.has_unfinished():
            raise RequestError("score needs an idle engine: finish or abort its requests first")
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
        group = self._intake.accept(self._fresh_id(), token_ids[:prompt_len], params, 0)
        with self._failing():
            logits = self._loop.score(group, forced)
        if group.requests[0].error is not None:
            raise group.requests[0].error
        return logits

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
        `NonFiniteLogitsError`. `collector` tells how often Python's garbage collector ran since the
        engine was made, and its seconds. `step_budget` (None without `max_itl_ms`) sets what steps
        with prefill took beside rows that decode against what was predicted.
        """
        return engine_stats(
            self._open_parts(),
            self._loop,
            self._encoded,
            self._step_budget,
            max_model_len=self.max_model_len,
            healthy=self._failure is None,
        )

    def check_integrity(self) -> None:
        """Assert every invariant that can be checked between two steps. For tests."""
        self._open_parts()
        self._loop.check_integrity()

    @property
    def _loop(self) -> StepLoop:
        self._open_parts()
        assert self._open_loop is not None
        return self._open_loop

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember what ends a step halfway, an interrupt too: its requests are neither here nor
        there, and the device is in an unknown state."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                raise EngineFailedError(f"step {self._loop.num_steps} failed: {error}") from error
            raise

    def _fresh_id(self) -> str:
        unclaimed = {output.request_id for output in self._unclaimed}
        while True:
            self._next_id += 1
            request_id = f"request-{self._next_id}"
            if request_id not in self._loop.groups and request_id not in unclaimed:
                return request_id

    def _open_parts(self) -> EngineParts:
        if self._parts is None:
            raise EngineClosedError("the engine is closed: make a new one to go on")
        return self._parts

    def _check_usable(self) -> None:
        self._open_parts()
        if self._failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier ({self._failure!r}): close it and make a new one"
            ) from self._failure
