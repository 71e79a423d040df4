"""Log-probabilities of tokens, and of a prompt as the chunks of its prefill compute them.

The logits at position p predict the token at position p + 1. So a prompt of P tokens has P - 1
positions to score, each once, in order:

    prompt      t0   t1   t2   t3   t4
    scored       0    1    2    3            positions whose logits are needed
    entries    None  t1   t2   t3   t4       `entries`

A preempted request may compute keys and values again, but scores no position twice. Does not import
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Float32Array: TypeAlias = npt.NDArray[np.float32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

LOWEST_LOGPROB = -3.4028234663852886e38
"""The most negative float32."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, under the model's unprocessed distribution.

    All of them are finite, so `json.dumps(..., allow_nan=False)` takes them.
    """

    token_id: int
    logprob: float
    """At least `LOWEST_LOGPROB`."""
    top: dict[int, float]
    """The `SamplingParams.logprobs` most probable tokens, most probable first. Tokens of
    probability 0 (a logit of -inf) are left out rather than listed with -inf, which is not a JSON
    number: so there may be fewer."""


class PromptLogprobs:
    """What launched and committed steps know of one prompt's log-probabilities."""

    def __init__(
        self, prompt_ids: Sequence[int], num_top: int, embedded: Sequence[range] = ()
    ) -> None:
        """Begin with nothing known; `num_top` tokens are to be reported for each of the prompt.

        Positions in `embedded` have an embedding in the place of a token, and no entry.
        """
        self.num_top = num_top
        self.num_positions = len(prompt_ids) - 1
        """Positions to score: all but the last."""
        self.num_launched = 0
        """Of them, those that launched steps score. They are the first ones."""
        self._prompt_ids = prompt_ids
        self._embedded = embedded
        self._num_known = 0
        self._logprobs: list[Float32Array] = []
        self._tops: list[tuple[Int64Array, Float32Array]] = []

    @property
    def reusable_tokens(self) -> int | None:
        """Tokens whose keys and values may come from the cache; None: all.

        The logits of tokens after them are needed, so a step must compute them.
        """
        return None if self.num_launched == self.num_positions else self.num_launched

    def unscored(self, start: int, stop: int) -> range:
        """Return the positions of a chunk that no launched step scores."""
        return range(max(start, self.num_launched), min(stop, self.num_positions))

    def launch(self, positions: range) -> None:
        """Count the result of `unscored` for a launched chunk."""
        if positions:
            assert positions.start == self.num_launched, "a chunk skips positions to score"
            self.num_launched = positions.stop

    def append(
        self,
        positions: range,
        logprobs: Float32Array,
        top_ids: Int64Array,
        top_logprobs: Float32Array,
    ) -> bool:
        """Append the scores of n launched positions, in order; return whether all are valid.

        `logprobs` `[n]` are of the tokens that follow; NaN where logits are not a distribution.
        `top_ids` and `top_logprobs` `[n, k]` have at least `num_top` tokens, highest first.
        """
        assert positions.start == self._num_known, "scores arrive out of order"
        self._num_known = positions.stop
        self._logprobs.append(logprobs.copy())
        k = self.num_top
        self._tops.append((top_ids[:, :k].copy(), top_logprobs[:, :k].copy()))
        return not bool(np.isnan(logprobs).any())

    def entries(self) -> list[TokenLogprobs | None]:
        """Return an entry for each token of the prompt; an empty list until all are known.

        None for the first token, and for embeddings.
        """
        if self._num_known < self.num_positions:
            return []
        found: list[TokenLogprobs | None] = [None]
        for values, (ids, tops) in zip(self._logprobs, self._tops, strict=True):
            for value, top_ids, top_values in zip(
                values.tolist(), ids.tolist(), tops.tolist(), strict=True
            ):
                pairs = zip(top_ids, top_values, strict=True)
                top = {token: logprob for token, logprob in pairs if logprob > -math.inf}
                token_id = self._prompt_ids[len(found)]
                found.append(TokenLogprobs(token_id, max(value, LOWEST_LOGPROB), top))
        for span in self._embedded:
            found[span.start : span.stop] = [None] * len(span)
        return found
