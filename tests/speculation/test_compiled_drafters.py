"""Drafters and grammars with steps of `torch.compile`: tokens are those without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.kernels import have_compiler

from ..distributed.test_tensor_parallel_drafters import prompts, speculation
from ..rigs.engine_rig import MIXED_PARAMS
from ..rigs.structured_rig import GRAMMARS
from ..rigs.tiny_models import TinyModel
from .test_speculation import run_mixed

pytestmark = [
    pytest.mark.slow,  # the compiler takes minutes for the full sampler
    pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler"),
]

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "mode": "compile",
    "kernels": "torch",
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_model_len": 128,
    "prefill_chunk": 32,
    "num_blocks": 64,
    "structured_output": True,
}
Tokens = dict[str, Any]


def versions(engine: Engine) -> int:
    """How many pieces of code were compiled, or found in the cache."""
    return sum(engine.stats()["start"]["code_cache"].values())


def tokens(engine: Engine) -> Tokens:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    texts = ["def add(a, b):\n    return", "import os\nimport", "x = [1, 2, 3]\nfor"]
    prompts = [tokenizer.encode(text) for text in [*texts, *texts]]
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.3),
        SamplingParams(max_tokens=30, temperature=0.0, n=2),
        SamplingParams(max_tokens=24, temperature=0.0, structured=GRAMMARS[1]),
        SamplingParams(max_tokens=24, seed=4, structured=GRAMMARS[0], logprobs=2),
        SamplingParams(max_tokens=24, temperature=0.7, seed=5, repetition_penalty=1.2),
    ]
    return run_mixed(engine, prompts, params)


@pytest.fixture(scope="module")
def expected() -> Iterator[Tokens]:
    with Engine.from_pretrained("demo", EngineConfig(**CONFIG)) as engine:
        # Prefill; of one row or token, and of several: decode, full sampler, masks, greedy tokens.
        assert versions(engine) == 1 + 2 * 4
        yield tokens(engine)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_tokens_are_those_of_plain_decoding(expected: Tokens, method: str) -> None:
    """With the head that was trained for the demo model, and with the model itself."""
    speculation: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    if method == "draft_model":
        speculation["model"] = "demo"
    with Engine.from_pretrained("demo", EngineConfig(**CONFIG, speculation=speculation)) as engine:
        # Of one row and of several: steps that only propose, and that verify, whatever the drafts.
        # Masked tokens of verify steps.
        assert versions(engine) == 1 + 2 * 4 + 2 * 2 + 1
        assert tokens(engine) == expected
        stats = engine.stats()
        assert stats["fallbacks"] == 0
        assert stats["speculation"]["accepted"] > 20
        engine.check_integrity()


@pytest.mark.parametrize("kind", ["dflash", "mtp mimo", "mtp deepseek_v3"])
def test_drafters_of_tiny_models(base: TinyModel, tmp_path: Path, kind: str) -> None:
    """They read several layers, or the last hidden state before or after its norm."""
    target, fields = speculation(kind, base, tmp_path)
    config = CONFIG | {"max_model_len": 64, "structured_output": False}
    found = []
    for own in (None, fields):
        with Engine.from_pretrained(target, EngineConfig(**config, speculation=own)) as engine:
            found.append(run_mixed(engine, prompts(target), MIXED_PARAMS))
            stats = engine.stats()
            assert stats["fallbacks"] == 0
    assert found[1] == found[0]
    assert stats["speculation"]["verified_rows"] > 20
    assert stats["speculation"]["accepted"] > 0 or kind == "dflash"  # whose weights are random
