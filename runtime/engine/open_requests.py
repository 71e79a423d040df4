"""The unfinished requests of an engine: their tokens, end and outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..errors import NonFiniteLogitsError, StructuredOutputError
from ..execution.outputs import Sampled
from ..execution.prompt_scorer import Score
from ..kernels.ops.feedback import NON_FINITE
from ..request import AbortReason, FinishReason, Request, RequestGroup, RequestStatus
from ..scheduling.scheduler import Scheduler
from .request_output import RequestOutput

__all__ = ["OpenRequests"]

logger = logging.getLogger("stepgraph.runtime")

_FINISHED = RequestStatus.FINISHED


class OpenRequests:
    """Queues requests, appends their tokens, ends them and creates their outputs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.groups: dict[str, RequestGroup] = {}
        """The requests of each prompt by id, until their last output was made."""
        self.counts = dict.fromkeys(
            ("requests", "finished", "output_tokens", "scored_prompt_tokens", "non_finite"), 0
        )
        self.ready: list[RequestOutput] = []
        """Outputs that have not been returned yet, in order."""
        self.any_finished = False
        """Whether `ready` may contain the last output of a request."""
        self._scheduler = scheduler
        self._group_of: dict[Request, RequestGroup] = {}
        self._changed: dict[RequestGroup, None] = {}  # changed since their last output, in order

    def add(self, group: RequestGroup) -> None:
        """Queue the requests of a group."""
        self.groups[group.id] = group
        for request in group.requests:
            self._group_of[request] = group
            self._scheduler.add(request)
            self.counts["requests"] += 1

    def abort(self, group: RequestGroup, reason: AbortReason = "abort") -> None:
        """End the unfinished requests of a group. The next step returns their output."""
        if self.groups.get(group.id) is not group or group.finished:
            return
        for request in group.requests:
            if request.status is not _FINISHED:
                self._finish(request, reason)
        self._changed[group] = None

    def discard(self, group: RequestGroup) -> None:
        """End the requests of a group, if it is known, without an output."""
        self.abort(group)
        if self.groups.get(group.id) is group:
            self._changed.pop(group, None)
            del self.groups[group.id]

    def pause(self, group: RequestGroup) -> None:
        """Take the rows of the unfinished requests of a group until `resume`."""
        for request in self._unfinished(group):
            if not request.paused:
                request.paused = True
                self._scheduler.pause(request)

    def resume(self, group: RequestGroup) -> None:
        """Let the paused requests of a group run again."""
        for request in self._unfinished(group):
            if request.paused:
                request.paused = False
                self._scheduler.resume(request)

    def _unfinished(self, group: RequestGroup) -> list[Request]:
        if self.groups.get(group.id) is not group:
            return []
        return [request for request in group.requests if request.status is not _FINISHED]

    def append(self, sampled: Iterable[Sampled], now_ns: int) -> None:
        """Append the tokens of a committed step to their requests, and end those that stop.

        Tokens of requests that have ended since the launch are discarded.
        """
        taken = 0
        for request, token_id, logprobs in sampled:
            if request is None or request.status is _FINISHED:
                continue
            request.num_pending -= 1
            if token_id == NON_FINITE:
                self._end_non_finite(request)
                continue
            if request.params.max_tokens == 0:
                self._changed[self._group_of[request]] = None
                self._finish(request, "length")
                continue
            taken += 1
            request.append_token(token_id, now_ns)
            if logprobs is not None:
                request.logprobs.append(logprobs)
            self._changed[self._group_of[request]] = None
            if token_id in request.stop_token_ids and (
                request.num_output > request.params.min_tokens
            ):
                text = request.detokenizer
                if text is not None and text.include_stop:
                    reason = self._end_of_text(request, token_id)
                    self._finish(request, "error" if reason == "error" else "stop")
                    continue
                self._finish(request, "stop")
                continue
            if request.detokenizer is not None:
                reason = self._end_of_text(request, token_id)
                if reason is not None:
                    self._finish(request, reason)
                    continue
            if request.num_output >= request.max_tokens:
                self._finish(request, "length")
        self.counts["output_tokens"] += taken

    def append_scores(self, scores: Iterable[Score]) -> None:
        """Append the scores of prompt tokens of a committed step, before its tokens.

        Scores of requests that have ended since the launch are discarded.
        """
        for request, positions, logprobs, top_ids, top_logprobs in scores:
            if request.status is _FINISHED:
                continue
            assert request.prompt_logprobs is not None, "a request without prompt_logprobs"
            self.counts["scored_prompt_tokens"] += len(positions)
            if not request.prompt_logprobs.append(positions, logprobs, top_ids, top_logprobs):
                self._end_non_finite(request, "prompt_logprobs cannot be computed")

    def end_by_grammar(self, request: Request, error: StructuredOutputError | None) -> None:
        """End a request whose grammar allows no further token: it is complete, or has failed."""
        request.error = error
        self._changed[self._group_of[request]] = None
        if request.detokenizer is not None and error is not None:
            request.detokenizer.finish()  # its text so far is valid, unlike that of other errors
        self._finish(request, "stop" if error is None else "error")

    def collect(self) -> None:
        """Create outputs for changed groups, and remove finished groups."""
        outputs = [RequestOutput.of(group) for group in self._changed]
        self._changed.clear()
        for output in outputs:
            if output.finished:
                del self.groups[output.request_id]
                self.any_finished = True
        self.ready += outputs

    def clear(self) -> None:
        """Release all requests."""
        self.groups.clear()
        self._group_of.clear()
        self._changed.clear()
        self.ready = []

    def _end_of_text(self, request: Request, token_id: int) -> FinishReason | None:
        """Add the newest token of a request to its text; return a finish reason, or None."""
        assert request.detokenizer is not None
        try:
            request.detokenizer.push((token_id,))
            return None if request.detokenizer.stopped is None else "stop"
        except Exception as error:  # only this request fails
            logger.exception("request %s failed", request.id)
            request.error = error
            return "error"

    def _end_non_finite(
        self, request: Request, consequence: str = "no token can be chosen"
    ) -> None:
        """End a request with non-finite logits, and withdraw its unverified blocks."""
        request.error = NonFiniteLogitsError(
            f"request {request.id}: {consequence} after {request.num_tokens} tokens,"
            f" {request.num_output} of them output: its logits hold NaN or +inf, or its sampling"
            " parameters leave nothing but -inf; look for NaN in the weights, or choose bfloat16"
            " where float16 overflows"
        )
        self.counts["non_finite"] += 1
        self._changed[self._group_of[request]] = None
        self._scheduler.withdraw(request)
        if request.detokenizer is not None:
            request.detokenizer.finish()
        self._finish(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.detokenizer is not None and reason != "error":
            request.detokenizer.finish()
        request.status = _FINISHED
        request.finish_reason = reason
        request.row = None
        request.siblings = []
        self._scheduler.remove(request)
        request.shed()
        del self._group_of[request]
        self.counts["finished"] += 1
