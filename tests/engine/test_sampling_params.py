"""Parameters of requests: what is refused, and that they cannot be changed."""

import math

import pytest
from stepgraph.runtime.errors import RequestError
from stepgraph.runtime.sampling_params import SamplingParams


def refused(**fields: object) -> str:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**fields)  # type: ignore[arg-type]
    return str(raised.value)


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


def test_logit_bias_is_an_immutable_copy() -> None:
    given_bias = {5: 1, 7: -2.5}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[5] = 100
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 3.0  # type: ignore[index]


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    for params in (SamplingParams(logit_bias={10: 1.0}), SamplingParams(stop_token_ids=[10])):
        with pytest.raises(RequestError):
            params.check_vocabulary(10)
