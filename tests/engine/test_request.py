"""Requests as the engine changes them, and outputs that no later step changes."""

from __future__ import annotations

import torch
from stepgraph.cache.prefix_hashes import PrefixHashes
from stepgraph.runtime.engine.request_output import RequestOutput
from stepgraph.runtime.prompt_embeds import EmbeddedSpan, EncodedContent
from stepgraph.runtime.request import (
    Request,
    RequestGroup,
    TokenLogprobs,
)

from ..rigs.request_rig import make_request

MS = 1_000_000


def take(request: Request, token_id: int, at_ns: int) -> None:
    """What the loop does with a token."""
    request.append_token(token_id, at_ns)
    request.logprobs.append(TokenLogprobs(token_id, -0.5, {token_id: -0.5}))


def test_what_a_user_does_to_an_output_touches_no_request() -> None:
    request = make_request([1], arrival_ns=5 * MS)
    take(request, 7, 6 * MS)
    output = RequestOutput.of(RequestGroup("a", [1], [request]))
    output.token_ids.clear()
    output.logprobs.clear()
    assert output.token_ids == request.output_ids == [7]
    assert len(output.logprobs) == len(request.logprobs) == 1


def test_timing_is_that_of_the_tokens_shown() -> None:
    request = make_request([1], arrival_ns=5 * MS)
    group = RequestGroup("a", [1], [request])
    assert RequestOutput.of(group).timing is None
    for at in (25, 30, 50):
        take(request, 7, at * MS)
    third = RequestOutput.of(group)
    take(request, 7, 60 * MS)
    assert third.timing is not None
    assert (third.timing.ttft_ms, third.timing.itl_ms) == (20.0, [5.0, 20.0])
    later = RequestOutput.of(group).timing
    assert later is not None
    assert later.itl_ms == [5.0, 20.0, 10.0]


def test_hashes_tell_embeddings_apart() -> None:
    """By content, and by where in it a block begins; what stands behind a block is not its own."""

    def hashes(*spans: tuple[int, float]) -> list[bytes]:
        embeds = tuple(
            EmbeddedSpan(position, EncodedContent.of(torch.full((3, 4), value)))
            for position, value in spans
        )
        request = make_request([7] * 8, prefix_hashes=PrefixHashes(2), embeds=embeds)
        found = request.hashes_of(8)
        assert found is not None
        return [found[block] for block in range(4)]

    plain, one, other, later = hashes(), hashes((2, 0.5)), hashes((2, 0.25)), hashes((3, 0.5))
    assert plain[0] == one[0] == other[0] == later[0]
    assert len({plain[1], one[1], other[1], later[1]}) == 4
    assert hashes((2, 0.5)) == one
    assert hashes((2, 0.5), (6, 1.0))[:3] == one[:3]
