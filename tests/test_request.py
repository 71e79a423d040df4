"""Requests as the engine changes them, and outputs that no later step changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.request import (
    Request,
    RequestGroup,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
)
from stepgraph.runtime.sampling_params import SamplingParams

MS = 1_000_000


class Text:
    """Stands for a detokenizer: text grows with the tokens."""

    text = ""
    stopped = None


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
    return Request(prompt_ids=prompt, output_ids=output, **(options | fields))


def take(request: Request, token_id: int, at_ns: int) -> None:
    """What the loop does with a token."""
    request.output_ids.append(token_id)
    request.token_ns.append(at_ns)
    request.logprobs.append(TokenLogprobs(token_id, -0.5, {token_id: -0.5}))
    if request.detokenizer is not None:
        request.detokenizer.text += f"<{token_id}>"  # type: ignore[misc]


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
    assert [output.text for output in outputs[:3]] == ["", "<11>", "<11><12>"]
    assert [len(output.logprobs) for output in outputs] == [0, 1, 2, 3, 3]
    assert [output.finished for output in outputs] == [False] * 4 + [True]
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["stop"]
    assert [output.num_preemptions for output in outputs] == [0, 1, 2, 3, 3]
    assert all(output.request_id == "a" for output in outputs)
    assert all(output.prompt_token_ids == [1, 2] for output in outputs)


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
