"""Models of transformers in the engine: their tokens and logits are those of transformers."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepgraph import Engine, EngineConfig, SamplingParams
from stepgraph.profiling import attribution
from stepgraph.runtime.errors import CheckpointError, ConfigError, StepPreparationError
from stepgraph.runtime.kernels import have_compiler
from stepgraph.runtime.kernels.ops.linear import Linear
from stepgraph.runtime.loading.loader import read_config
from stepgraph.runtime.models.plan import plan_of
from stepgraph.runtime.tools.memory_report import explain_memory
from stepgraph.runtime.tools.step_costs import explain_step

from ..rigs.engine_rig import greedy
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401

transformers = pytest.importorskip("transformers")

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")

SIZES = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {"rotary_pct": 0.5},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "shared_expert_intermediate_size": 48,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
"""Traits: learned positions and Conv1D; partial rotation; parallel residual and scaled logits; soft
caps and windows; attention sinks; shared experts; biases and offset positions. `test_model_matrix`
has all other models."""


def save(model_type: str, directory: Path, seed: int = 1, **changes: Any) -> Path:
    """Save a small random model."""
    config = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, **MODELS.get(model_type, {}), **changes}
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms are not trivial either
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


@cache
def checkpoint(model_type: str) -> Path:
    return save(model_type, Path(mkdtemp(prefix=f"stepgraph-{model_type}-")))


def engine(directory: Path, **config: Any) -> Engine:
    small = {
        "mode": "eager",
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_model_len": 128,
        "prefill_chunk": 16,
        "model_impl": "transformers",
    }
    return Engine.from_pretrained(directory, EngineConfig(**{**small, **config}))


@cache
def reference(directory: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 151, (n,), generator=generator).tolist() for n in lengths]


def expected_logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities `[tokens - 1, V]` after each token but the last."""
    with torch.no_grad():
        logits = reference(directory)(torch.tensor([token_ids])).logits[0].float()
    return logits.log_softmax(-1)[:-1]


def score_gap(running: Engine, directory: Path, prompt: list[int]) -> float:
    """The largest difference to transformers of the log-probability of a token of the prompt."""
    (scored,) = running.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    ours = torch.tensor([e.logprob for e in scored.prompt_logprobs if e is not None])
    expected = expected_logprobs(directory, prompt).gather(1, torch.tensor(prompt[1:])[:, None])
    return float((ours - expected[:, 0]).abs().max())


def check_greedy(running: Engine, directory: Path, lengths: tuple[int, ...] = (5, 1, 40)) -> None:
    """Compare tokens and their log-probabilities with those of transformers."""
    given = prompts(*lengths)
    for prompt, output in zip(given, running.generate(given, greedy(logprobs=0)), strict=True):
        tokens = [*prompt, *output.token_ids]
        logprobs = expected_logprobs(directory, tokens)[len(prompt) - 1 :]
        assert logprobs.argmax(-1).tolist() == list(output.token_ids)
        ours = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(ours, logprobs.amax(-1), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_generates_the_tokens_of_transformers(model_type: str) -> None:
    directory = checkpoint(model_type)
    with engine(directory) as running:
        check_greedy(running, directory)
        assert running.stats()["model_impl"] == "transformers"
        weights = running.stats()["memory"]["weights"]
        assert weights["planned"] == weights["measured"]


def refusal(config: dict[str, Any], tmp_path: Path, **engine_config: Any) -> str:
    """The message that refuses a checkpoint without weights: nothing of them is read."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        engine(tmp_path, **engine_config)
    return str(caught.value)


def saved_config(model_type: str, **changes: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(model_type, **SIZES)
    found: dict[str, Any] = {**config.to_dict(), **changes}
    return found


@pytest.mark.parametrize(
    ("model_type", "changes", "facts"),
    [
        ("mamba", {}, ("MambaForCausalLM", "attention interface")),
        ("bloom", {}, ("BloomForCausalLM", "attention interface")),
        ("bert", {}, ("bert.encoder.layer.0", "bidirectional_mask_function")),
        ("t5", {}, ("'t5'", "is_encoder_decoder")),
        ("llama", {"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, ("LlamaForCausalLM",)),
        ("llama", {"torch_dtype": "float64", "dtype": "float64"}, ("float64", "bfloat16")),
    ],
)
def test_refuses_what_it_cannot_run_before_it_reads_weights(
    model_type: str, changes: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    message = refusal(saved_config(model_type, **changes), tmp_path)
    assert all(fact in message for fact in facts), message


def test_refuses_remote_code_and_models_that_nobody_knows(tmp_path: Path) -> None:
    remote = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (tmp_path / "modeling.py").write_text("raise AssertionError('ran remote code')")
    for model_impl in ("auto", "transformers"):
        message = refusal(remote, tmp_path, model_impl=model_impl)
        assert "'mine'" in message
        assert "auto_map" in message
    assert "LlamaForCausalLM" in refusal(remote, tmp_path, model_impl="native")
    with pytest.raises(ConfigError):
        Engine.from_pretrained("preset:smollm2-135m", EngineConfig(model_impl="transformers"))


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_refuses_tensors_that_do_not_fit_the_model(change: str, tmp_path: Path) -> None:
    source, name = checkpoint("gpt_neox"), "gpt_neox.layers.1.attention.dense.weight"
    tensors = load_file(source / "model.safetensors")
    if change == "missing":
        tensors["gpt_neox.layers.1.attention.other"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name][:8] if change == "shape" else tensors[name].double()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    message = refusal(json.loads((source / "config.json").read_text()), tmp_path)
    assert name in message


def test_keeps_rotations_that_change_with_the_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    directory = save("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    with engine(directory, max_model_len=64) as running:
        check_greedy(running, directory)
    with pytest.raises(ConfigError) as caught:
        engine(directory)
    assert caught.value.field == "max_model_len"


def test_auto_takes_transformers_where_there_is_no_family() -> None:
    with pytest.warns(RuntimeWarning):
        running = engine(checkpoint("opt"), model_impl="auto")
    with running:
        assert running.stats()["model_impl"] == "transformers"
        assert [f["name"] for f in running.stats()["kernel_fallbacks"]] == ["decoder layers"]
    with engine(checkpoint("llama"), model_impl="auto") as running:
        assert running.stats()["model_impl"] == "native"


WINDOWED = "gemma2"
"""The model of the tests of the engine's features."""


@pytest.mark.parametrize(
    "config",
    [
        {"prefix_cache": False, "prefill_chunk": 7},
        {"num_blocks": 14, "host_cache_bytes": 1 << 20},
        {"block_size": 5, "prompt_embeds": True},
    ],
)
def test_tokens_do_not_depend_on_the_cache(config: dict[str, Any]) -> None:
    directory = checkpoint(WINDOWED)
    with engine(directory, **config) as running:
        check_greedy(running, directory, (30, 31, 29, 33))
        running.check_integrity()


def test_shares_prefixes_and_scores_prompts() -> None:
    directory, (prompt,) = checkpoint(WINDOWED), prompts(60)
    with engine(directory) as running:
        check_greedy(running, directory, (60,))
        check_greedy(running, directory, (60,))
        assert running.stats()["cache"]["hit_tokens"] > 0
        assert score_gap(running, directory, prompt) < 2e-4
        forked = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
        (together,) = running.generate([prompt], forked)
        (again,) = running.generate([prompt], forked)
        tokens = [tuple(c.token_ids) for c in together.completions]
        assert tokens == [tuple(c.token_ids) for c in again.completions]
        assert len(set(tokens)) > 1


@pytest.mark.parametrize(
    "storage",
    [
        *({"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"weight_dtype": "int8"}),
        *({"weight_dtype": "fp8"}, {"dtype": "float16"}),
    ],
)
def test_quantised_logits_are_close(storage: dict[str, Any]) -> None:
    directory, (prompt,) = checkpoint("gpt_neox"), prompts(40)
    with engine(directory, **storage) as running:
        assert 0 < score_gap(running, directory, prompt) < 0.15


@pytest.mark.sampled(5)
@pytest.mark.parametrize("storage", [{}, {"weight_dtype": "int8"}])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "qwen2_moe"])
def test_replaces_weights(model_type: str, storage: dict[str, Any], tmp_path: Path) -> None:
    other = save(model_type, tmp_path / "other", seed=2)
    shorter = save(model_type, tmp_path / "shorter", num_hidden_layers=1)
    given = prompts(20, 5)
    with engine(other, **storage) as fresh:
        expected = [output.token_ids for output in fresh.generate(given, greedy())]
    with engine(checkpoint(model_type), **storage) as running:
        before = [output.token_ids for output in running.generate(given, greedy())]
        with pytest.raises(ConfigError):
            running.reload_weights(shorter)
        assert [output.token_ids for output in running.generate(given, greedy())] == before
        running.reload_weights(other)
        assert [output.token_ids for output in running.generate(given, greedy())] == expected
        assert before != expected


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gemma2"])
def test_plans_memory_before_weights_are_there(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint(model_type) / "config.json").read_text())
    config = EngineConfig(model_impl="transformers", device="cpu", max_model_len=128)
    assert f"{tmp_path} in float32" in explain_memory(tmp_path, config, 1 << 30)
    with pytest.raises(ConfigError):
        explain_step(tmp_path, config, rows=1, context=10, bandwidth=1e9)


def test_quantises_and_packs_neither_routers_nor_an_embedding_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(saved_config("afmoe")))
    plan = plan_of(read_config(tmp_path, "transformers"))
    linears = {
        source.name
        for op in plan.layers[1].operations
        if isinstance(op, Linear)
        for source in op.weight.sources
    }
    assert "model.layers.1.self_attn.o_proj.weight" in linears
    assert "model.layers.1.mlp.router.gate.weight" not in linears
    assert plan_of(read_config(checkpoint("gemma2"), "transformers")).tied  # and scaled


def test_captured_steps_give_the_same_tokens(fake_graphs: FakeGraphs) -> None:
    directory = checkpoint(WINDOWED)
    with attribution.recording() as names:
        running = engine(directory, mode="graph", compile=False, buckets=(1, 4))
    with running:
        check_greedy(running, directory)
        assert running.stats()["fallbacks"] == 0
    (step, *_) = (step for step in names.steps if step.phase == "decode")
    found = {node.label for node in step.nodes}
    for scope in ("head", "q_proj", "attention", "down_proj", "pre_feedforward_layernorm"):
        assert any(scope in name for name in found), (scope, found)


def test_threads_load_models_at_once() -> None:
    """transformers changes settings of the process while it loads, such as the default dtype."""
    models = {"gpt2": "float32", "opt": "bfloat16", "cohere": "float32", "llama": "bfloat16"}

    def run(model_type: str) -> list[list[int]]:
        with engine(checkpoint(model_type), dtype=models[model_type]) as running:
            return [list(output.token_ids) for output in running.generate(prompts(5, 20), greedy())]

    expected = [run(model_type) for model_type in models]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, models)) == expected
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("version", ["5.16.1", "4.57.0", "unknown"])
def test_refuses_old_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ConfigError):
        engine(checkpoint("opt"))
    with pytest.raises(CheckpointError):
        engine(checkpoint("opt"), model_impl="auto")


@needs_compiler
def test_names_the_line_that_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaMLP.forward

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", broken)
    with pytest.raises(StepPreparationError, match=r"test_transformers_models\.py:\d+.*eager"):
        engine(checkpoint("llama"), mode="compile")
    with engine(checkpoint("llama")) as running:
        check_greedy(running, checkpoint("llama"))


@needs_compiler
def test_no_request_compiles_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are traced, but run as they are: tracing decides how many versions there are."""
    compiled, graphs = torch.compile, torch._dynamo.utils.counters["stats"]

    def traced(part: Any, *, options: dict[str, Any], **keywords: Any) -> Any:
        guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return compiled(part, backend="eager", options=guards, **keywords)

    monkeypatch.setattr(torch, "compile", traced)
    directory, before = checkpoint("gpt2"), graphs["unique_graphs"]
    with engine(directory, mode="compile") as running:
        made = graphs["unique_graphs"]
        assert made - before == 3  # prefill steps, decode steps of many rows and of one
        check_greedy(running, directory)
        check_greedy(running, directory, (17,))
        random = SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True)
        outputs = running.generate(prompts(2, 33, 16), [random, greedy(), random])
        assert graphs["unique_graphs"] == made
        (alone,) = running.generate(prompts(2), random)
        assert alone.token_ids == outputs[0].token_ids
