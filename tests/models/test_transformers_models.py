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

from ..rigs.causal_models import CausalModel, save_small_model
from ..rigs.engine_rig import greedy
from ..rigs.fake_graphs import FakeGraphs, make_fake_graphs  # noqa: F401

transformers = pytest.importorskip("transformers")

needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")


@cache
def model(model_type: str, seed: int = 0) -> CausalModel:
    return save_small_model(model_type, Path(mkdtemp(prefix=f"stepgraph-{model_type}-")), seed=seed)


def checkpoint(model_type: str) -> Path:
    return model(model_type).directory


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


def check_greedy(running: Engine, of: CausalModel, lengths: tuple[int, ...] = (5, 1, 40)) -> None:
    """Compare tokens and their log-probabilities with transformers."""
    given = of.prompts(*lengths)
    for prompt, output in zip(given, running.generate(given, greedy(logprobs=0)), strict=True):
        logits = of.logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(output.token_ids)
        ours = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(ours, logits.log_softmax(-1).amax(-1), atol=1e-3, rtol=1e-3)


def score_gap(running: Engine, of: CausalModel, prompt: list[int]) -> float:
    """The largest difference to transformers of the log-probability of a token of the prompt."""
    (scored,) = running.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    ours = torch.tensor([e.logprob for e in scored.prompt_logprobs if e is not None])
    expected = of.logits(prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])
    return float((ours - expected[:, 0]).abs().max())


def refusal(config: dict[str, Any], tmp_path: Path, **engine_config: Any) -> str:
    """The message that refuses a checkpoint without weights: nothing of them is read."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        engine(tmp_path, **engine_config)
    return str(caught.value)


def saved_config(model_type: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict() | changes
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
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 64,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    phi3 = save_small_model("phi3", tmp_path, changes)
    with engine(tmp_path, max_model_len=64) as running:
        check_greedy(running, phi3)
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path)
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
        {"num_blocks": 11, "max_model_len": 64, "host_cache_bytes": 1 << 20},
        {"block_size": 5, "prompt_embeds": True},
    ],
)
def test_tokens_do_not_depend_on_the_cache(config: dict[str, Any]) -> None:
    windowed = model(WINDOWED)
    with engine(windowed.directory, **config) as running:
        check_greedy(running, windowed, (30, 31, 29, 33))
        check_greedy(running, windowed, (15, 14, 13, 12))
        assert bool(running.stats()["preemptions"]) == ("num_blocks" in config)
        running.check_integrity()


def test_shares_prefixes_and_scores_prompts() -> None:
    windowed = model(WINDOWED)
    (prompt,) = windowed.prompts(60)
    with engine(windowed.directory) as running:
        check_greedy(running, windowed, (60,))
        check_greedy(running, windowed, (60,))
        assert running.stats()["cache"]["hit_tokens"] > 0
        assert score_gap(running, windowed, prompt) < 1e-3
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
    neox = model("gpt_neox")
    (prompt,) = neox.prompts(40)
    with engine(neox.directory, **storage) as running:
        assert 0 < score_gap(running, neox, prompt) < 0.5


@pytest.mark.sampled(5)
@pytest.mark.parametrize("storage", [{}, {"weight_dtype": "int8"}])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "qwen2_moe"])
def test_replaces_weights(model_type: str, storage: dict[str, Any], tmp_path: Path) -> None:
    other, given = model(model_type, seed=2).directory, model(model_type).prompts(20, 5)
    shorter = save_small_model(model_type, tmp_path, {"max_position_embeddings": 64}).directory
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
    windowed = model(WINDOWED)
    with attribution.recording() as names:
        running = engine(windowed.directory, mode="graph", compile=False, buckets=(1, 4))
    with running:
        check_greedy(running, windowed)
        assert running.stats()["fallbacks"] == 0
    (step, *_) = (step for step in names.steps if step.phase == "decode")
    found = {node.label for node in step.nodes}
    for scope in ("head", "q_proj", "attention", "down_proj", "pre_feedforward_layernorm"):
        assert any(scope in name for name in found), (scope, found)


def test_threads_load_models_at_once() -> None:
    """transformers changes settings of the process while it loads, such as the default dtype."""
    models = {"gpt2": "float32", "opt": "bfloat16", "cohere": "float32", "llama": "bfloat16"}

    def run(model_type: str) -> list[list[int]]:
        given = model(model_type).prompts(5, 20)
        with engine(checkpoint(model_type), dtype=models[model_type]) as running:
            return [list(output.token_ids) for output in running.generate(given, greedy())]

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
        check_greedy(running, model("llama"))


@needs_compiler
def test_no_request_compiles_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are traced, but run as they are: tracing decides how many versions there are."""
    compiled, graphs = torch.compile, torch._dynamo.utils.counters["stats"]

    def traced(part: Any, *, options: dict[str, Any], **keywords: Any) -> Any:
        guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return compiled(part, backend="eager", options=guards, **keywords)

    monkeypatch.setattr(torch, "compile", traced)
    gpt2, before = model("gpt2"), graphs["unique_graphs"]
    with engine(gpt2.directory, mode="compile") as running:
        made = graphs["unique_graphs"]
        assert made - before == 3  # prefill steps, decode steps of many rows and of one
        check_greedy(running, gpt2)
        check_greedy(running, gpt2, (17,))
        random = SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True)
        outputs = running.generate(gpt2.prompts(2, 33, 16), [random, greedy(), random])
        assert graphs["unique_graphs"] == made
        (alone,) = running.generate(gpt2.prompts(2), random)
        assert alone.token_ids == outputs[0].token_ids
