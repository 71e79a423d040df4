"""Requests as the engine changes them, and outputs that no later step changes."""

from __future__ import annotations

from stepgraph.runtime.engine.request_output import RequestOutput
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
