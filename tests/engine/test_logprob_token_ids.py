"""Log-probabilities of chosen tokens are those of the model, however steps are launched."""

from __future__ import annotations

from typing import Any

import pytest

from ..rigs.engine_rig import Open, greedy
from ..rigs.tiny_models import Tiny

IDS = (3, 40, 41)


@pytest.mark.parametrize(
    "config",
    [
        {"kernels": "torch"},
        {"speculation": {"method": "ngram", "adaptive": False}},
        {"speculation": "draft_model"},
    ],
    ids=str,
)
@pytest.mark.native_kernels
def test_chosen_tokens_are_reported(open_engine: Open, tiny: Tiny, config: dict[str, Any]) -> None:
    model = tiny("text")
    drafts = config.get("speculation") == "draft_model"
    if drafts:
        method = {"method": "draft_model", "model": str(model.directory), "adaptive": False}
        config = {"speculation": method}
    engine = open_engine("text", dtype="float32", **config)
    prompts = [[7, 30, 41, 7, 30, 41, 7, 30], [5, 9, 5, 9, 5]]
    chosen, plain = greedy(12, logprobs=0, logprob_token_ids=IDS), greedy(40)
    (expected,) = engine.generate([prompts[1]], plain)
    found, other = engine.generate(prompts, [chosen, plain])
    assert other.completions[0].token_ids == expected.completions[0].token_ids
    (completion,) = found.completions
    assert completion.logprobs is not None
    sequence = [*prompts[0], *completion.token_ids]
    logprobs = model.logits(sequence).double().log_softmax(-1)
    for position, entry in enumerate(completion.logprobs, start=len(prompts[0]) - 1):
        values = logprobs[position]
        assert entry.token_id == sequence[position + 1]
        assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=1e-4)
        assert entry.top == pytest.approx({i: float(values[i]) for i in IDS}, abs=1e-4)
    if drafts:
        assert engine.stats()["speculation"]["drafted"] > 0
