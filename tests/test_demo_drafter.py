"""The drafter of the demo model: published names, shapes, size; what it guesses; its training."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stepgraph.runtime.demo import train_drafter
from stepgraph.runtime.demo.drafter_acceptance import right_drafts, summary
from stepgraph.runtime.demo.drafter_text import DEMO, Continuation, tokenizer
from stepgraph.runtime.demo.eagle3 import (
    Eagle3Config,
    Eagle3Head,
    TargetFeatures,
    load_head,
    save_head,
)
from transformers import AutoModelForCausalLM

DRAFTER = DEMO / "drafter"
TINY = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=40,
    draft_vocab_size=12,
    aux_layer_ids=(1, 2, 3),
    max_position_embeddings=64,
)


def random_head(config):
    head = Eagle3Head(config)
    head.set_vocabulary(torch.arange(3, 3 + 2 * config.draft_vocab_size, 2))
    return head.eval()


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def test_the_checkpoint_has_the_published_layout():
    config = json.loads((DRAFTER / "config.json").read_text())
    weights = load_file(DRAFTER / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    D, inner, V = 256, config["intermediate_size"], config["draft_vocab_size"]
    layer = "midlayer."
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
        "fc.weight": (D, 3 * D),
        layer + "self_attn.q_proj.weight": (D, 2 * D),
        layer + "self_attn.k_proj.weight": (64, 2 * D),
        layer + "self_attn.v_proj.weight": (64, 2 * D),
        layer + "self_attn.o_proj.weight": (D, D),
        layer + "mlp.gate_proj.weight": (inner, D),
        layer + "mlp.up_proj.weight": (inner, D),
        layer + "mlp.down_proj.weight": (D, inner),
        layer + "input_layernorm.weight": (D,),
        layer + "hidden_norm.weight": (D,),
        layer + "post_attention_layernorm.weight": (D,),
        "norm.weight": (D,),
        "lm_head.weight": (V, D),
        "d2t": (V,),
        "t2d": (4096,),
    }
    ids = torch.arange(V) + weights["d2t"]
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert torch.equal(weights["t2d"].nonzero()[:, 0], ids)
    size = sum(path.stat().st_size for path in DRAFTER.iterdir())
    assert size < 3_000_000


def test_drafts_of_the_demo_are_mostly_right(target):
    ids = torch.tensor([tokenizer().encode("def main0(").ids])
    text = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=100,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    head = load_head(DRAFTER)
    features = TargetFeatures(target, head.config.aux_layer_ids)
    right = right_drafts(head, features, Continuation(text, ids.shape[1]), 3)
    assert float(right.double().mean()) > 1.0


def test_unrolled_logits_are_those_of_drafting():
    torch.manual_seed(0)
    head = random_head(TINY)
    features, embedding = torch.randn(10, 48), torch.randn(40, 16)
    tokens = torch.randint(40, (11,))
    drafts = head.draft(features, tokens, lambda ids: embedding[ids], 4)
    longer = torch.cat([tokens, torch.tensor(drafts)])
    for chains in ([9], [2, 9], list(range(10))):
        outputs = head.unroll(
            features[None], embedding[longer[1:-1]][None], torch.tensor(chains), 4
        )
        unrolled = [int(logits[0, -1].argmax()) for logits in outputs]
        assert [i + int(head.d2t[i]) for i in unrolled] == drafts
        assert [len(logits[0]) for logits in outputs] == [10] + 3 * [len(chains)]


def test_the_first_tokens_of_a_chain_do_not_depend_on_later_ones():
    torch.manual_seed(0)
    head = random_head(TINY)
    features, embeds = torch.randn(1, 10, 48), torch.randn(1, 12, 16)
    chains = torch.tensor([3, 6])
    before = head.unroll(features, embeds, chains, 3)
    features[:, 7:] += 1
    embeds[:, 9:] += 1
    after = head.unroll(features, embeds, chains, 3)
    torch.testing.assert_close(after[0][:, :7], before[0][:, :7])
    assert not torch.allclose(after[0][:, 7:], before[0][:, 7:])
    for old, new in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(new, old)


def test_a_checkpoint_survives_saving(tmp_path):
    head = random_head(TINY)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert loaded.config == TINY
    for name, weight in head.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=1e-2, atol=0)


def test_accepted_lengths():
    # With one draft, steps are at positions 0, 2, 3 and 4; with two, at 0, 3 and 4.
    result = summary([torch.tensor([2, 1, 0, 0, 1])], 2)
    assert result["acceptance"] == [0.6, 0.2]
    assert result["accepted_length"] == [1.5, 2.0]


def test_the_training_script(tmp_path, monkeypatch):
    sources = [DEMO / "train.py", DEMO / "perplexity.py"]
    monkeypatch.setattr(train_drafter, "source_files", lambda root: (sources, []))
    monkeypatch.setattr(train_drafter, "measure", lambda *arguments: [])
    monkeypatch.setattr(train_drafter, "LENGTH", 200)
    monkeypatch.setattr(train_drafter, "SOURCE_LENGTH", 400)
    settings = {
        "--steps": 9,
        "--batch-tokens": 400,
        "--draft-vocabulary": 64,
        "--intermediate-size": 32,
        "--continuations": 4,
        "--drafts": 3,
        "--threads": 1,
        "--text": tmp_path / "text.npy",
        "--output": tmp_path / "out",
    }
    train_drafter.main([str(word) for item in settings.items() for word in item])
    text = np.load(tmp_path / "text.npy")
    assert text.shape == (4, 200)
    head = load_head(tmp_path / "out")
    assert set(head.target_ids().tolist()) <= set(text.ravel().tolist())
    assert all(bool(weight.isfinite().all()) for weight in head.parameters())
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (report["steps"], report["continuation_tokens"]) == (9, text.size)
