"""The synchronous engine, the public interface: requests in, outputs out.

`Intake` makes requests of prompts, `StepLoop` runs the steps (see `loop.py`), and `SharedLoop`
makes it safe for several threads. `StartedEngine` has the methods that concern no request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, cast, get_args

import torch

from ..arguments import check_choice, check_config, check_integer, check_type
from ..config import EngineConfig
from ..errors import RequestError
from ..loading.chat_template import ChatPrompt, Message, chat_prompts
from ..prompt_embeds import EncodedContent, PromptEmbeds
from ..prompt_ids import plain_batch, type_name
from ..request import AbortReason, RequestGroup
from ..sampling_params import SamplingParams
from ..structured_output import StructuredOutput
from .intake import Prompt
from .request_output import RequestOutput
from .started_engine import StartedEngine
from .startup import start

__all__ = ["Engine"]


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
                f" {self.max_model_len}, one predicted token included"
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
            f"params must be SamplingParams or a sequence of them, not {type_name(params)}"
        )
    each = cast("Sequence[SamplingParams]", params)
    if len(each) != count:
        raise RequestError(
            f"{count} prompts, but {len(each)} SamplingParams: give one for all, or one for each"
            " prompt"
        )
    return each
