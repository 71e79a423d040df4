"""The model that ships with the package: trained, small, and read by transformers unchanged."""

from pathlib import Path

import pytest
import torch
from stepgraph.runtime.kernels import have_compiler
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..rigs.engine_rig import greedy, opened

DEMO = Path(__file__).resolve().parents[2] / "runtime" / "demo"
CONFIG = {"dtype": "float32", "kernels": "native" if have_compiler() else "torch"}
PROMPTS = ["def ", "import ", "class Node:\n    def __init__(self", "for i in range(", "x"]


@pytest.fixture(scope="module")
def engine():
    with opened("demo", **CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def test_greedy_tokens_are_those_of_transformers(engine, reference):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, greedy(32)), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # the first token is no padding
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.token_ids == expected.tolist()
        assert output.text == tokenizer.decode(expected)


def test_drafts_of_its_drafter_are_mostly_right(engine):
    speculation = {"method": "eagle3", "num_speculative_tokens": 3, "adaptive": False}
    (expected,) = engine.generate(["def main0("], greedy(100))
    with opened("demo", **CONFIG, speculation=speculation) as drafting:
        (output,) = drafting.generate(["def main0("], greedy(100))
        stats = drafting.stats()["speculation"]
    assert output.token_ids == expected.token_ids
    assert stats["drafted"] > 50
    assert stats["accepted"] > stats["drafted"] / 3
