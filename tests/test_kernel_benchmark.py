"""The kernels of a decode step are timed one by one, each over tensors of the model's shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stepgraph.runtime import ConfigError, EngineConfig
from stepgraph.runtime.bench.results.result_tables import tables
from stepgraph.runtime.bench.scenarios.kernel_times import measure_kernels
from stepgraph.runtime.models.config import ModelConfig
from stepgraph.runtime.models.presets import PRESETS
from stepgraph.runtime.resolved_config import ResolvedConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = ["norm_linear", "decode_attention", "combine_output", "gate_up", "down", "head"]


def tiny(name: str) -> ModelConfig:
    """A preset with its family's ways in few numbers."""
    fields = {
        field: getattr(PRESETS[name], field)
        for field in ("model_type", "hidden_act", "query_pre_attn_scalar", "sliding_rope")
    }
    return ModelConfig(
        **fields,
        vocab_size=40,
        hidden_size=32,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-3.2-1b", {}),
        ("qwen3-0.6b", {"weight_dtype": "int8"}),
        ("gemma-3-1b", {"kv_dtype": "int8"}),
    ],
)
def test_every_kernel_runs_on_what_it_would_be_timed_on(name: str, kinds: dict[str, str]) -> None:
    pytest.importorskip("triton")
    model = tiny(name)
    config = ResolvedConfig.resolve(
        EngineConfig(device=DEVICE.type, mode="eager", block_size=4, **kinds), model
    )
    copies: list[int] = []

    def seconds(run: Callable[[int], None], launches: int) -> list[float]:
        run(0)
        copies.append(launches)
        return [2e-6, 3e-6, 4e-6]

    entries = list(
        measure_kernels(model, config, DEVICE, rows=2, context=7, bandwidth=4.3e12, seconds=seconds)
    )
    assert [entry["kernel"] for entry in entries] == KERNELS
    assert [entry["launches"] for entry in entries] == [2] * 5 + [1]
    for entry in entries:
        assert entry["measured_us"]["p50"] == pytest.approx(3.0)
        assert entry["predicted_us"] == pytest.approx(1e6 * entry["bytes"] / 4.3e12 + 0.35)
        assert entry["copies"] == 2  # never more than there are layers
    assert set(copies) == {16}
    names = {"model": name, "dtype": "auto", "weight_dtype": "auto", "kv_dtype": "auto"}
    document = {"kernels": [{**names, "rows": 2, "context": 7, **entry} for entry in entries]}
    ((_, rows),) = tables(document)
    assert [row["kernel"] for row in rows] == KERNELS


def test_rows_that_the_library_decodes_are_refused() -> None:
    model = tiny("llama-3.2-1b")
    config = ResolvedConfig.resolve(EngineConfig(device="cpu", mode="eager"), model)
    with pytest.raises(ConfigError, match="above 32 use cuBLAS"):
        next(
            measure_kernels(
                model, config, torch.device("cuda"), rows=65, context=9, bandwidth=4.3e12
            )
        )
