"""The mixtures of experts of the supported families, as transformers computes them."""

from __future__ import annotations

from typing import Any

from ..bounded_repr import bounded_repr
from ..errors import CheckpointError
from .experts_config import ExpertLayout, ExpertTraits
from .family import Json, read_field

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "GPT_OSS", "LLAMA4", "MIXTRAL", "QWEN3_MOE"]


def _mixtral(config: Json) -> dict[str, Any]:
    return {"norm_topk_prob": True}


def _qwen3(config: Json) -> dict[str, Any]:
    return {"norm_topk_prob": read_field(config, "norm_topk_prob", bool)}


def _gpt_oss(config: Json) -> dict[str, Any]:
    return {"scores": "softmax_chosen"}


def _llama4(config: Json) -> dict[str, Any]:
    return {"scores": "sigmoid", "n_shared_experts": 1}


def _deepseek(config: Json) -> dict[str, Any]:
    return {
        "n_shared_experts": read_field(config, "n_shared_experts", int, 0),
        "routed_scaling_factor": read_field(config, "routed_scaling_factor", float),
    }


def _deepseek_groups(config: Json) -> dict[str, Any]:
    return {name: read_field(config, name, int, 1) for name in ("n_group", "topk_group")}


def _deepseek_v2(config: Json) -> dict[str, Any]:
    """transformers 5.23 ignores `norm_topk_prob`."""
    method = read_field(config, "topk_method", str)
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"topk_method = {bounded_repr(method)} is not supported; supported: 'greedy', "
            "'group_limited_greedy'"
        )
    return _deepseek(config) | (_deepseek_groups(config) if method != "greedy" else {})


def _deepseek_v3(config: Json) -> dict[str, Any]:
    """transformers 5.23 ignores `topk_method` and `scoring_func`."""
    return {
        **_deepseek(config),
        **_deepseek_groups(config),
        "scores": "sigmoid",
        "norm_topk_prob": read_field(config, "norm_topk_prob", bool),
        "group_score": "top_2_sum",
    }


def _qwen3_dense(config: Json, layers: int) -> tuple[int, ...]:
    step, listed = _step(config, "decoder_sparse_step"), _layers(config, "mlp_only_layers")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _llama4_dense(config: Json, layers: int) -> tuple[int, ...]:
    if config.get("moe_layers") is not None:
        mixtures = _layers(config, "moe_layers")
        return tuple(i for i in range(layers) if i not in mixtures)
    step = _step(config, "interleave_moe_layer_step")
    return tuple(i for i in range(layers) if (i + 1) % step)


def _deepseek_dense(config: Json, layers: int) -> tuple[int, ...]:
    if (every := read_field(config, "moe_layer_freq", int, 1)) != 1:
        raise CheckpointError(
            f"moe_layer_freq = {every} is not supported; every layer after the first "
            "first_k_dense_replace ones must be a mixture of experts (moe_layer_freq = 1)"
        )
    first = read_field(config, "first_k_dense_replace", int, 0)
    return tuple(range(max(0, min(first, layers))))


def _step(config: Json, name: str) -> int:
    step = read_field(config, name, int, 1)
    if step < 1:
        raise CheckpointError(f"{name} = {step} must be at least 1")
    return step


def _layers(config: Json, name: str) -> frozenset[int]:
    value = config.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise CheckpointError(f"{name} must be a list of layers, not {bounded_repr(value)}")
    return frozenset(value)


_BY_EXPERT = ExpertLayout(
    gate_up=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    down="mlp.experts.{}.down_proj.weight",
)
_STACKED = ExpertLayout()

MIXTRAL = ExpertTraits(
    routing=_mixtral,
    layouts=(
        ExpertLayout(
            router="block_sparse_moe.gate",
            gate_up=(
                "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight",
            ),
            down="block_sparse_moe.experts.{}.w2.weight",
        ),
        _STACKED,
    ),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
)
QWEN3_MOE = ExpertTraits(
    routing=_qwen3,
    dense_layers=_qwen3_dense,
    optional=True,
    layouts=(_BY_EXPERT, _STACKED),
)
GPT_OSS = ExpertTraits(
    routing=_gpt_oss,
    layouts=(
        ExpertLayout(
            router="mlp.router",
            gate_up=("mlp.experts.gate_up_proj_blocks",),
            down="mlp.experts.down_proj_blocks",
            interleaved=True,
        ),
        ExpertLayout(router="mlp.router", transposed=True, interleaved=True),
    ),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    router_bias=True,
    biases=True,
    mxfp4=True,
)
DEEPSEEK_V2 = ExpertTraits(
    routing=_deepseek_v2,
    dense_layers=_deepseek_dense,
    optional=True,
    layouts=(_BY_EXPERT, _STACKED),
    keys={"num_experts": "n_routed_experts"},
    shared="mlp.shared_experts",
)
DEEPSEEK_V3 = ExpertTraits(
    routing=_deepseek_v3,
    dense_layers=_deepseek_dense,
    optional=True,
    layouts=(_BY_EXPERT, _STACKED),
    keys={"num_experts": "n_routed_experts"},
    shared="mlp.shared_experts",
    correction="mlp.gate.e_score_correction_bias",
)
LLAMA4 = ExpertTraits(
    routing=_llama4,
    dense_layers=_llama4_dense,
    layouts=(
        ExpertLayout(
            router="feed_forward.router",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down="feed_forward.experts.down_proj",
            transposed=True,
        ),
    ),
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    shared="feed_forward.shared_expert",
    scaled_inputs=True,
)
