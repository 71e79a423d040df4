"""Attention sinks and clamped activations: their arithmetic, natively and in plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepgraph.runtime import Engine, EngineConfig, SamplingParams
from stepgraph.runtime.engine import startup
from stepgraph.runtime.kernels import Kernels, have_compiler, native_gaps
from stepgraph.runtime.kernels.ops.layer_operations import Activate, Attend
from stepgraph.runtime.kernels.ops.layer_plan import LayerPlan
from stepgraph.runtime.kernels.ops.stack import stack_obstacle
from stepgraph.runtime.kernels.triton.fusion import Activation, GateUp, NormLinear, fuse
from stepgraph.runtime.loading import loader
from stepgraph.runtime.loading.loader import random_weights
from stepgraph.runtime.models import families, presets, resolved_config
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.plan import model_plan

LIMIT = 0.2
"""Low, so that random gates and ups reach it."""
TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
WINDOWED = {"layer_types": ("sliding_attention", "full_attention") * 1 + ("sliding_attention",)}
PROMPTS = [[5, 7, 11, 13, 17, 19, 23, 2, 3, 5, 8], [3]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def config(*, sinks: bool = True, clamped: bool = True, **changes: Any) -> ModelConfig:
    kind = f"{'sinks' if sinks else 'plain'}_{'clamped' if clamped else 'silu'}"
    limit = {"swiglu_limit": LIMIT} if clamped else {}
    return ModelConfig(model_type=kind, **(TINY | limit | changes))


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    for sinks in (False, True):
        for clamped in (False, True):
            kind = f"{'sinks' if sinks else 'plain'}_{'clamped' if clamped else 'silu'}"
            family = dataclasses.replace(families.FAMILIES["llama"], attention_sinks=sinks)
            monkeypatch.setitem(families.FAMILIES, kind, family)


def weights(model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Random ones, ten times as large as those of presets, so that sinks and limits matter."""
    for name, tensor in random_weights(model, torch.float32, seed=3):
        yield name, tensor if name.endswith("norm.weight") else 10 * tensor


def logits(model: ModelConfig, token_ids: list[int]) -> torch.Tensor:
    """What the model computes, written down once more in float64: `[T, vocabulary]`."""
    w = {name: tensor.double() for name, tensor in weights(model)}
    heads, groups, size = model.num_heads, model.num_kv_heads, model.head_dim
    length = len(token_ids)
    angles = torch.arange(length)[:, None] * model.rope_theta ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    distance = torch.arange(length)[:, None] - torch.arange(length)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.rms_norm_eps).sqrt() * w[name]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    x = w["embed_tokens.weight"][token_ids]
    for layer in range(model.num_layers):
        at = f"layers.{layer}"
        qkv = norm(x, f"{at}.input_norm.weight") @ w[f"{at}.attention.qkv.weight"].T
        q, k, v = qkv.view(length, -1, size).split((heads, groups, groups), dim=1)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (rotated(k), v))
        scores = torch.einsum("qhe,khe->hqk", rotated(q), k) * size**-0.5
        hidden = distance < 0
        if (window := model.window(layer)) is not None:
            hidden = hidden | (distance >= window)
        shares = scores.masked_fill(hidden, -torch.inf).exp()
        total = shares.sum(-1, keepdim=True)
        if model.family.attention_sinks:
            total = total + w[f"{at}.attention.sinks.weight"].exp()[:, None, None]
        attended = torch.einsum("hqk,khe->qhe", shares / total, v).flatten(1)
        x = x + attended @ w[f"{at}.attention.output.weight"].T
        both = norm(x, f"{at}.mlp_norm.weight") @ w[f"{at}.gate_up.weight"].T
        gate, up = both.chunk(2, dim=-1)
        if model.swiglu_limit:
            gate = gate.clamp(max=model.swiglu_limit)
            up = up.clamp(-model.swiglu_limit, model.swiglu_limit)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            inner = up * gate * torch.sigmoid(gate)
        x = x + inner @ w[f"{at}.down.weight"].T
    return norm(x, "norm.weight") @ w["embed_tokens.weight"].T


def greedy(model: ModelConfig, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        token_ids.append(int(logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture
def open_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    monkeypatch.setattr(loader, "random_weights", lambda model, *_, **__: weights(model))

    def open_(model: ModelConfig, **settings: Any) -> Engine:
        monkeypatch.setitem(presets.PRESETS, "traits", model)
        defaults = {"device": "cpu", "mode": "eager", "max_num_seqs": 2, "block_size": 4,
                    "max_model_len": 48, "prefill_chunk": 8, "num_blocks": 64}  # fmt: skip
        engine = Engine.from_pretrained("preset:traits", EngineConfig(**defaults | settings))
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.close()


def check(engine: Engine, model: ModelConfig) -> None:
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [greedy(model, prompt) for prompt in PROMPTS]
    token_ids = PROMPTS[0]
    expected = logits(model, token_ids)
    for prompt_len in (1, 6, len(token_ids)):
        found = engine.score(token_ids, prompt_len).double().cpu()
        torch.testing.assert_close(found, expected[prompt_len - 1 :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("traits", [{"sinks": False}, {"clamped": False}, {}])
def test_plain_torch_computes_them(
    open_model: Callable[..., Engine], traits: dict[str, bool]
) -> None:
    for changes in ({}, WINDOWED | {"sliding_window": 5}):
        model = config(**traits, **changes)
        check(open_model(model), model)
        ordinary = config(sinks=False, clamped=False, **changes)
        difference = logits(model, PROMPTS[0]) - logits(ordinary, PROMPTS[0])
        assert difference[-1].abs().max() > 0.01, "a model that shows no trait shows nothing"


@pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler")
def test_a_cpu_runs_them_natively(
    open_model: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager steps, as torch.compile would take most of the time.
    monkeypatch.setattr(resolved_config, "resolve_kernels", lambda *_: "native")
    model = config()
    engine = open_model(model)
    check(engine, model)
    stats = engine.stats()
    assert (stats["kernels"], stats["kernel_fallbacks"]) == ("cpu", [])


@pytest.mark.usefixtures("steps_are_not_measured")
@pytest.mark.parametrize("traits", [{"sinks": False}, {"clamped": False}])
def test_triton_computes_them(
    open_model: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, traits: dict[str, bool]
) -> None:
    pytest.importorskip("triton")
    from stepgraph.runtime.kernels.triton.backend import gpu_kernels
    from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
    from stepgraph.runtime.kernels.triton.operations import Operations

    if not INTERPRETED:
        pytest.skip("needs the interpreter")

    called: set[str] = set()

    def select(*arguments: Any, **_: Any) -> Kernels:
        native = Operations()
        spied = {
            field.name: _spy(field.name, getattr(native, field.name), called)
            for field in dataclasses.fields(Operations)
        }
        return gpu_kernels(arguments[3], Operations(**spied))

    monkeypatch.setattr(startup, "select_kernels", select)
    monkeypatch.setattr(startup, "check_kernels", lambda kernels, *_, **__: kernels)
    monkeypatch.setattr(resolved_config, "resolve_kernels", lambda *_: "native")
    model = config(**traits, num_layers=2)
    engine = open_model(model)
    outputs = engine.generate(
        [PROMPTS[0][:6], PROMPTS[1]], SamplingParams(max_tokens=3, temperature=0.0)
    )
    expected = [greedy(model, prompt)[:3] for prompt in (PROMPTS[0][:6], PROMPTS[1])]
    assert [o.token_ids for o in outputs] == expected
    # A product computes its activation, but for a clamped one, which is a kernel of its own.
    assert called & {"gate_up", "activate_rows"} == {
        "gate_up" if "clamped" in traits else "activate_rows"
    }
    assert {"decode_attention", "prefill_attention", "residual_linear"} <= called


def _spy(name: str, run: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        called.add(name)
        return run(*arguments, **keywords)

    return call


def test_what_a_backend_does_not_list_is_unsupported() -> None:
    """Whatever trait is added: no backend has to know of it to refuse it."""
    plan = model_plan(config())
    assert stack_obstacle(plan) is None
    shared = LayerPlan(
        tuple(
            dataclasses.replace(op, shared_values=True) if isinstance(op, Attend) else op
            for op in plan.layers[0].operations
        )
    )
    unknown = dataclasses.replace(plan, layers=(shared, *plan.layers[1:]))
    assert stack_obstacle(unknown) == "attention with shared_values"
    assert native_gaps("cuda", torch.bfloat16, "model", plan) == ()
    kernels = fuse(plan.layers[0])
    assert [type(kernel) for kernel in kernels[-3:-1]] == [NormLinear, Activation]
    ordinary = model_plan(config(sinks=False, clamped=False)).layers[0]
    assert isinstance(fuse(ordinary)[-2], GateUp)
    attend = next(op for op in plan.operations if isinstance(op, Attend))
    activate = next(op for op in plan.operations if isinstance(op, Activate))
    assert attend.traits == {"sinks"}
    assert activate.traits == {"limit", "alpha", "up_offset"}
