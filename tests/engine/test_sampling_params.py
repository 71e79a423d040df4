"""Every parameter has a type and a range, and the error names field, value and range."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.sampling_params import SamplingParams

INTEGERS = {
    "max_tokens": (0, 1 << 20),
    "min_tokens": (0, 1 << 20),
    "top_k": (-1, (1 << 31) - 1),
    "seed": (0, (1 << 63) - 1),
    "n": (1, 128),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
REALS = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
REALS_ABOVE = {"top_p": (0.0, 1.0), "repetition_penalty": (0.0, 10.0)}


def refused(**fields: object) -> str:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**fields)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("field", INTEGERS)
@given(value=st.integers())
def test_an_integer_is_taken_exactly_within_its_range(field: str, value: int) -> None:
    low, high = INTEGERS[field]
    if low <= value <= high:
        expected = 0 if (field, value) == ("top_k", -1) else value  # another word for off
        assert getattr(SamplingParams(**{field: value}), field) == expected
    else:
        message = refused(**{field: value})
        assert field in message
        assert str(value) in message
        assert f"from {low} to {high}" in message


@pytest.mark.parametrize("field", [*REALS, *REALS_ABOVE])
@given(value=st.floats() | st.integers())
def test_a_real_is_taken_exactly_within_its_range(field: str, value: float) -> None:
    low, high = (REALS | REALS_ABOVE)[field]
    inside = low <= value <= high and not (field in REALS_ABOVE and value == low)
    if inside:
        taken = getattr(SamplingParams(**{field: value}), field)
        assert taken == value
        assert isinstance(taken, float)
    else:
        assert field in refused(**{field: value})


@pytest.mark.parametrize("field", [*INTEGERS, *REALS, *REALS_ABOVE])
@pytest.mark.parametrize("value", [True, "1", [1], 1j])
def test_other_types_are_refused(field: str, value: object) -> None:
    assert field in refused(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 3, "max_tokens": 2},
        {"ignore_eos": 1},
        {"logit_bias": [(1, 2.0)]},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: math.nan}},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["a"] * 17},
        {"stop": "a" * 1025},
        {"stop": [1]},
        {"stop": 1},
        {"stop": {"a"}},
        {"stop_token_ids": [0] * 17},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1 << 31]},
        {"stop_token_ids": ["1"]},
        {"stop_token_ids": "1"},
        {"stop_token_ids": 7},
    ],
)
def test_refused_combinations_name_their_first_field(fields: dict[str, object]) -> None:
    message = refused(**fields)
    assert next(iter(fields)) in message
    assert len(message) < 300


def test_logit_bias_is_a_copy_that_nobody_can_change() -> None:
    given_bias = {5: 1, 7: -2.5}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[5] = 100
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 3.0  # type: ignore[index]


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    for params in (SamplingParams(logit_bias={10: 1.0}), SamplingParams(stop_token_ids=[10])):
        with pytest.raises(RequestError, match="10; allowed is a token id from 0 to 9"):
            params.check_vocabulary(10)
