"""Log-probabilities of prompts and of chosen tokens are those of transformers, in any steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepgraph.runtime import EmbeddedSpan, EncodedContent, PromptEmbeds, RequestOutput
from stepgraph.runtime.errors import NonFiniteLogitsError

from ..rigs.engine_rig import Open, greedy, run
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401
from ..rigs.tiny_models import Tiny, TinyModel

LENGTHS = (29, 1, 2, 64, 7)
SCORED = greedy(8, prompt_logprobs=3)


def assert_scores(
    output: RequestOutput, prompt: Sequence[int], logits: torch.Tensor, *, within: float = 1e-4
) -> None:
    """Compare with the logits of a reference, `[len(prompt), V]`, in float64."""
    expected = logits.double().log_softmax(-1)
    entries = output.prompt_logprobs
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:]):
        assert entry is not None
        token = prompt[position + 1]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[position, token]), abs=within)
        tops, ids = expected[position].topk(3)
        assert list(entry.top.values()) == pytest.approx(tops.tolist(), abs=within)
        if within <= 1e-4:
            assert list(entry.top) == ids.tolist()


def assert_all(
    outputs: Sequence[RequestOutput], model: TinyModel, prompts: list[list[int]]
) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_scores(output, prompt, model.logits(prompt))


@pytest.mark.parametrize("variant", ["odd", "qwen3", "mistral", "gemma2", "gemma3", "deepseek_v3"])
def test_scores_are_those_of_transformers(open_engine: Open, tiny: Tiny, variant: str) -> None:
    """Soft caps, windows, biases, tied and untied heads; chunks end anywhere in the prompts."""
    model = tiny(variant)
    prompts = model.prompts(*LENGTHS)
    engine = open_engine(variant, block_size=4, prefill_chunk=13)
    outputs = engine.generate(prompts, SCORED)
    assert_all(outputs, model, prompts)
    assert [output.token_ids for output in outputs] == model.greedy(prompts, 8)
    stats = engine.stats()
    assert stats["scored_prompt_tokens"] == sum(LENGTHS) - len(LENGTHS)
    assert stats["fallbacks"] == 0


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunk=st.integers(1, 40), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_any_chunks(open_engine: Open, tiny: Tiny, chunk: int, lengths: list[int]) -> None:
    model = tiny("micro")
    prompts = model.prompts(*lengths)
    engine = open_engine("micro", block_size=4, prefill_chunk=chunk, max_num_seqs=3)
    assert_all(engine.generate(prompts, SCORED), model, prompts)
    engine.check_integrity()
    engine.close()


def test_cached_prompts_are_scored_and_shared(open_engine: Open, base: TinyModel) -> None:
    engine = open_engine("base", block_size=4, prefill_chunk=16)
    prompts = base.prompts(33, 50)
    for _ in range(2):  # the second time all blocks are in the prefix cache
        outputs = engine.generate(prompts, SCORED)
        assert_all(outputs, base, prompts)
        assert [output.cached_tokens for output in outputs] == [0, 0]
    assert [o.cached_tokens for o in engine.generate(prompts, greedy(8))] == [32, 48]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_completions_share_the_prompt_of_the_first(
    open_engine: Open, base: TinyModel, max_tokens: int
) -> None:
    engine = open_engine("base", block_size=4, prefill_chunk=11)
    (prompt,) = base.prompts(30)
    (output,) = engine.generate([prompt], greedy(max_tokens, n=3, prompt_logprobs=3))
    assert_scores(output, prompt, base.logits(prompt))
    expected = base.greedy([prompt], 1)[0][:max_tokens]
    assert [c.token_ids for c in output.completions] == [expected] * 3
    assert {c.finish_reason for c in output.completions} == {"length"}
    assert engine.stats()["scored_prompt_tokens"] == 29
    assert engine.stats()["output_tokens"] == 3 * max_tokens


@pytest.mark.parametrize(
    "config",
    [
        {"host_cache_bytes": 1 << 20},
        {"prefix_cache": False},
        {"mode": "graph", "compile": False, "max_model_len": 96, "buckets": (1, 4)},
    ],
    ids=str,
)
def test_preempted_prompts_are_scored_once(
    open_engine: Open, fake_graphs: FakeGraphs, base: TinyModel, config: dict[str, Any]
) -> None:
    """Decoding rows grow and preempt a prompt between two of its chunks. They do not change.

    Captured steps run after the host has launched the next one.
    """
    engine = open_engine("base", block_size=4, prefill_chunk=2, num_blocks=40, **config)
    fake_graphs.stream.behind = "mode" in config
    long, *urgent = base.prompts(70, 24, 24)
    for index, prompt in enumerate(urgent):
        engine.add_request(prompt, greedy(30), str(index))
    engine.add_request(long, SCORED, "long", priority=1)
    done = run(engine, checked=True)
    assert done["long"].num_preemptions > 0
    assert_scores(done["long"], long, base.logits(long))
    assert done["long"].token_ids == base.greedy([long], 8)[0]
    assert [done[str(i)].token_ids for i in range(2)] == base.greedy(urgent, 30)
    assert engine.stats()["scored_prompt_tokens"] == 69


def test_embeddings_have_no_score(open_engine: Open, base: TinyModel) -> None:
    """Tokens after them do, given the embeddings."""
    engine = open_engine("base", prompt_embeds=True, prefill_chunk=6)
    (prompt,) = base.prompts(20)
    vectors = torch.randn(4, 48, generator=torch.Generator().manual_seed(4))
    embeds = base.reference.get_input_embeddings()(torch.tensor([prompt])).detach().clone()
    embeds[0, 5:9] = vectors
    with torch.no_grad():
        expected = base.reference(inputs_embeds=embeds).logits[0].log_softmax(-1)
    spans: Any = [EmbeddedSpan(5, EncodedContent.of(vectors))]
    (output,) = engine.generate([PromptEmbeds(prompt, spans)], SCORED)
    entries = output.prompt_logprobs
    assert [i for i, entry in enumerate(entries) if entry is None] == [0, 5, 6, 7, 8]
    for position, entry in enumerate(entries):
        if entry is not None:
            value = float(expected[position - 1, prompt[position]])
            assert entry.logprob == pytest.approx(value, abs=1e-4)


def test_non_finite_logits_within_a_prompt_end_the_request(
    open_engine: Open, base: TinyModel
) -> None:
    engine = open_engine("base", prefill_chunk=4)
    poisoned, sound = base.prompts(20, 20)
    poisoned[9] = 96
    sound = [token % 96 for token in sound]
    with torch.no_grad():
        engine.decoder.embed_tokens.weight[96] = torch.nan
    for prompt in (poisoned, sound):  # a tied head: every distribution has the NaN
        (output,) = engine.generate([prompt], SCORED)
        assert isinstance(output.error, NonFiniteLogitsError)
        assert output.prompt_logprobs == []
    engine.check_integrity()


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
