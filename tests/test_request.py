"""Requests as the engine changes them, and outputs that no later step changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.cache.prefix_hashes import PrefixHashes
from stepgraph.runtime.engine.request_output import RequestOutput
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.prompt_embeds import EmbeddedSpan, EncodedContent
from stepgraph.runtime.request import (
    Request,
    RequestGroup,
    RequestStatus,
    TokenLogprobs,
)
from stepgraph.runtime.sampling_params import SamplingParams

MS = 1_000_000


class Text:
    """Stands for a detokenizer: text grows with the tokens."""

    text = ""
    num_chars = 0
    stopped = None

    def text_between(self, start: int, stop: int) -> str:
        return self.text[start:stop]


def make_request(prompt: list[int], output: list[int], **fields: object) -> Request:
    options: dict[str, object] = {
        "id": "a/0",
        "params": SamplingParams(max_tokens=8),
        "seed": 1,
        "order": (0, 1),
        "max_tokens": 8,
        "stop_token_ids": frozenset(),
        "detokenizer": None,
        "arrival_ns": 5 * MS,
    }
    request = Request(prompt_ids=prompt, **(options | fields))
    for token_id in output:
        request.append_token(token_id, 0)
    return request


def take(request: Request, token_id: int, at_ns: int) -> None:
    """What the loop does with a token."""
    request.append_token(token_id, at_ns)
    request.logprobs.append(TokenLogprobs(token_id, -0.5, {token_id: -0.5}))
    if request.detokenizer is not None:
        request.detokenizer.text += f"<{token_id}>"  # type: ignore[misc]
        request.detokenizer.num_chars = len(request.detokenizer.text)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), max_size=6),
    st.data(),
)
def test_known_tokens_are_prompt_and_output(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    request = make_request(prompt, output)
    sequence = prompt + output
    assert request.num_tokens == len(sequence)
    start = data.draw(st.integers(0, len(sequence)))
    stop = data.draw(st.integers(start, len(sequence)))
    assert request.tokens(start, stop) == sequence[start:stop]


def test_tokens_are_a_copy() -> None:
    request = make_request([1, 2], [3])
    request.tokens(0, 3).clear()
    request.tokens(0, 2).clear()
    assert (request.prompt_ids, request.output_ids) == ([1, 2], [3])


@pytest.mark.parametrize(
    ("output", "pending", "reached"),
    [(0, 0, False), (6, 1, False), (7, 1, True), (8, 0, True), (8, 1, True)],
)
def test_tokens_under_way_count_towards_the_most(output: int, pending: int, reached: bool) -> None:
    request = make_request([1], [0] * output, num_pending=pending)
    assert request.reached_max_tokens == reached


def test_requests_are_told_apart_by_identity() -> None:
    first, second = make_request([1], []), make_request([1], [])
    assert first != second
    assert len({first, second}) == 2


def test_a_group_is_finished_with_its_last_request() -> None:
    requests = [make_request([1], []), make_request([1], [])]
    group = RequestGroup("a", [1], requests)
    assert not group.finished
    for request, finished in zip(requests, (False, True), strict=True):
        request.status = RequestStatus.FINISHED
        request.finish_reason = "length"
        assert group.finished == finished
        assert RequestOutput.of(group).finished == finished


def test_outputs_are_snapshots() -> None:
    request = make_request([1, 2], [], detokenizer=Text())
    group = RequestGroup("a", [1, 2], [request])
    outputs = [RequestOutput.of(group)]
    for count in range(1, 4):
        take(request, 10 + count, (5 + 10 * count) * MS)
        request.num_preemptions = count
        outputs.append(RequestOutput.of(group))
    request.status = RequestStatus.FINISHED
    request.finish_reason = "stop"
    outputs.append(RequestOutput.of(group))

    assert [output.token_ids for output in outputs] == [
        [], [11], [11, 12], [11, 12, 13], [11, 12, 13],
    ]  # fmt: skip
    texts = ["", "<11>", "<11><12>", "<11><12><13>", "<11><12><13>"]
    assert [output.text for output in outputs] == texts
    assert [len(output.logprobs) for output in outputs] == [0, 1, 2, 3, 3]
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["stop"]
    assert [output.num_preemptions for output in outputs] == [0, 1, 2, 3, 3]
    request.shed()
    assert [len(output.token_ids) for output in outputs] == [0, 1, 2, 3, 3]
    assert outputs[-1].timing is not None
    assert all(output.request_id == "a" for output in outputs)
    assert all(output.prompt_token_ids == [1, 2] for output in outputs)


def test_deltas_are_what_the_previous_output_did_not_show() -> None:
    request = make_request([1, 2], [], detokenizer=Text())
    group = RequestGroup("a", [1, 2], [request])
    outputs = [RequestOutput.of(group)]
    for token_ids in [(11,), (12, 13), (), (14,)]:
        for token_id in token_ids:
            take(request, token_id, MS)
        outputs.append(RequestOutput.of(group))
    deltas = [output.delta for output in reversed(outputs)][::-1]  # whenever they are read
    assert [delta.token_ids for delta in deltas] == [(), (11,), (12, 13), (), (14,)]
    assert [delta.text for delta in deltas] == ["", "<11>", "<12><13>", "", "<14>"]
    assert [[entry.token_id for entry in delta.logprobs] for delta in deltas] == [
        [], [11], [12, 13], [], [14],
    ]  # fmt: skip
    assert RequestOutput("b", [1], (), True).delta.token_ids == ()


def test_what_a_user_does_to_an_output_touches_no_request() -> None:
    request = make_request([1], [])
    take(request, 7, 6 * MS)
    output = RequestOutput.of(RequestGroup("a", [1], [request]))
    output.token_ids.clear()
    output.logprobs.clear()
    assert output.token_ids == request.output_ids == [7]
    assert len(output.logprobs) == len(request.logprobs) == 1


def test_timing_is_that_of_the_tokens_shown() -> None:
    request = make_request([1], [])
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


def test_hashes_are_those_of_the_known_tokens() -> None:
    request = make_request([1, 2, 3, 4, 5], [6], prefix_hashes=PrefixHashes(2, "salt"))
    expected = PrefixHashes(2, "salt")
    expected.extend(lambda start, stop: [1, 2, 3, 4, 5, 6, 7, 8][start:stop], 8)
    assert request.hashes_of(3) is request.prefix_hashes
    assert len(request.prefix_hashes or ()) == 1
    request.hashes_of(6)
    request.append_token(7, 0)
    request.append_token(8, 0)
    hashes = request.hashes_of(8)
    assert hashes is not None
    assert [hashes[block] for block in range(len(hashes))] == [expected[i] for i in range(4)]


def test_who_shares_nothing_is_not_hashed() -> None:
    assert make_request([1, 2, 3, 4], []).hashes_of(4) is None


def test_hashes_tell_embeddings_apart() -> None:
    """By content, and by where in it a block begins; what stands behind a block is not its own."""

    def hashes(*spans: tuple[int, float]) -> list[bytes]:
        embeds = tuple(
            EmbeddedSpan(position, EncodedContent.of(torch.full((3, 4), value)))
            for position, value in spans
        )
        request = make_request([7] * 8, [], prefix_hashes=PrefixHashes(2), embeds=embeds)
        found = request.hashes_of(8)
        assert found is not None
        return [found[block] for block in range(4)]

    plain, one, other, later = hashes(), hashes((2, 0.5)), hashes((2, 0.25)), hashes((3, 0.5))
    assert plain[0] == one[0] == other[0] == later[0]
    assert len({plain[1], one[1], other[1], later[1]}) == 4
    assert hashes((2, 0.5)) == one
    assert hashes((2, 0.5), (6, 1.0))[:3] == one[:3]


def test_cached_tokens_are_those_of_completion_0() -> None:
    requests = [make_request([1, 2], []), make_request([1, 2], [], num_cached_tokens=1)]
    group = RequestGroup("a", [1, 2], requests)
    assert RequestOutput.of(group).cached_tokens == 0
    requests[0].num_cached_tokens = 16
    assert RequestOutput.of(group).cached_tokens == 16


def test_several_completions() -> None:
    requests = [make_request([1], []), make_request([1], [])]
    take(requests[0], 7, 6 * MS)
    take(requests[1], 8, 6 * MS)
    take(requests[1], 9, 7 * MS)
    for request in requests:
        request.num_preemptions = 2
    output = RequestOutput.of(RequestGroup("a", [1], requests))
    assert [completion.token_ids for completion in output.completions] == [[7], [8, 9]]
    assert output.token_ids == [7]
    assert output.num_preemptions == 4
    assert repr(output.completions[1]) == (
        "CompletionOutput(text='', token_ids=[8, 9], finish_reason=None)"
    )


def test_the_error_of_a_completion_is_that_of_the_output() -> None:
    requests = [make_request([1], []), make_request([1], [])]
    requests[1].error = ZeroDivisionError("broken")
    output = RequestOutput.of(RequestGroup("a", [1], requests))
    assert output.error is requests[1].error


def test_an_output_of_a_refused_prompt() -> None:
    error = RequestError("the prompt is empty")
    output = RequestOutput("a", [], (), True, error=error)
    assert output.finished
    assert output.finish_reason == "error"
    assert output.error is error
    assert (output.text, output.token_ids, output.logprobs, output.timing) == ("", [], [], None)
