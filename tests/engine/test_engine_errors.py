"""Every way to be refused: type of the error, and a message of thing, value and way out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepgraph.runtime import (
    CheckpointError,
    ConfigError,
    Engine,
    EngineConfig,
    MemoryBudgetError,
    RequestError,
    SamplingParams,
)

from ..rigs.tiny_models import Tiny, TinyModel, changed_checkpoint

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Any:
    """At most 32 tokens a sequence."""
    config = EngineConfig(device="cpu", mode="eager", max_num_seqs=4, max_model_len=32)
    with Engine.from_pretrained(tiny("base").directory, config) as engine:
        yield engine
        assert not engine.has_unfinished()
        engine.check_integrity()


@pytest.fixture
def checkpoint(tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return shutil.copytree(tiny("base").directory, tmp_path / "checkpoint")


def refusal(kind: type[Exception], call: Callable[[], object], *parts: object) -> str:
    """Return the message of the error, which is of this very type and has all of the parts."""
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    message = str(caught.value)
    for part in parts:
        assert str(part) in message
    return message


def start(source: str | Path, **config: Any) -> Engine:
    settings = {"device": "cpu", "mode": "eager"} | config
    return Engine.from_pretrained(source, EngineConfig(**settings))


# Checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"intermediate_size": 96}, ["mlp.gate_proj.weight", "[96, 48]", "[80, 48]"]),
        ({"num_hidden_layers": 4}, ["num_hidden_layers = 4", "3 layers"]),
        ({"num_hidden_layers": 2}, ["unexpected: model.layers.2."]),
        ({"attention_bias": True}, ["missing: model.layers.0.self_attn.q_proj.bias"]),
        ({"vocab_size": 98}, ["model.embed_tokens.weight", "[98, 48]", "[97, 48]"]),
        ({"tie_word_embeddings": False}, ["missing: lm_head.weight"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads = 6", "num_key_value_heads = 4"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, ["'spiral'", "'llama3'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_that_contradicts_the_tensors(
    checkpoint: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    changed_checkpoint(checkpoint, checkpoint, **changes)
    refusal(CheckpointError, lambda: start(checkpoint), *parts)


# Configuration and memory ------------------------------------------------------------------------


def test_memory_budget_too_small(base: TinyModel) -> None:
    message = refusal(
        MemoryBudgetError,
        lambda: start(base.directory, memory_bytes=1 << 20),
        "1048576 bytes",
        "the null block and 1 block for tokens",
        "raise the budget",
    )
    for term in ("weights", "cache", "static buffers", "activations", "logits", "reserve"):
        assert term in message
    # What it says is needed is enough, and not a byte too much.
    needed = int(message.split(" need ")[1].split(" bytes")[0])
    refusal(MemoryBudgetError, lambda: start(base.directory, memory_bytes=needed - 1), needed)
    with start(base.directory, memory_bytes=needed) as engine:
        assert engine.stats()["blocks"]["usable"] >= 1
        (output,) = engine.generate([[1, 2, 3]], GREEDY)
        assert len(output.token_ids) == 6


# Requests ----------------------------------------------------------------------------------------


def test_prompt_larger_than_the_cache(base: TinyModel) -> None:
    with start(base.directory, num_blocks=6, block_size=4, max_num_seqs=2) as engine:
        assert engine.max_model_len == 20
        message = refusal(
            RequestError, lambda: engine.add_request([1] * 20), "20 tokens", "at most 20"
        )
        assert "memory budget" in message
        # The longest one that fits is served, to the last slot of the cache.
        (output,) = engine.generate([[1] * 19], SamplingParams(max_tokens=9))
        assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_a_bad_request_does_not_touch_the_good_ones(engine: Engine, base: TinyModel) -> None:
    good = base.prompts(5, 9, 2, seed=51)
    prompts: list[Any] = [good[0], [], good[1], [5, 200], "text", [1] * 40, good[2]]
    with pytest.warns(UserWarning, match="4 of 7"):
        outputs = engine.generate(prompts, GREEDY)
    assert [outputs[i].token_ids for i in (0, 2, 6)] == base.greedy(good, 6)
    for index, part in ((1, "empty"), (3, "200"), (4, "tokenizer.json"), (5, "40 tokens")):
        output = outputs[index]
        assert (output.finished, output.finish_reason) == (True, "error")
        assert type(output.error) is RequestError
        assert part in str(output.error)
        assert (output.token_ids, output.text, output.timing) == ([], "", None)
        assert output.completions == ()
    assert all(outputs[i].error is None for i in (0, 2, 6))


def test_a_tied_head_that_differs(checkpoint: Path, base: TinyModel) -> None:
    """Both ways out give the model that they name."""
    ids = base.prompts(9, seed=5)[0]
    tied = base.logits(ids)[-1:]
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]

    def with_head(head: torch.Tensor) -> Path:
        edit = lambda tensors: tensors.update({"lm_head.weight": head})  # noqa: E731
        return changed_checkpoint(checkpoint, checkpoint, edit)

    with_head(embedding.clone())
    with start(checkpoint, dtype="float32") as engine:
        torch.testing.assert_close(engine.score(ids, 9), tied, rtol=1e-4, atol=1e-4)
    with_head(embedding * 2)
    refusal(
        CheckpointError,
        lambda: start(checkpoint),
        checkpoint / "model.safetensors",
        "lm_head.weight",
        "tie_word_embeddings=False",
        "tie_word_embeddings=True",
    )
    for choice, expected in ((True, tied), (False, 2 * tied)):
        with start(checkpoint, dtype="float32", tie_word_embeddings=choice) as engine:
            torch.testing.assert_close(engine.score(ids, 9), expected, rtol=1e-4, atol=1e-4)
    refusal(ConfigError, lambda: start(checkpoint, tie_word_embeddings=1), "tie_word_embeddings")
