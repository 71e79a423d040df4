"""How weights of linear layers are stored, in memory and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .bitsandbytes import BitsAndBytes
from .checkpoint_format import CheckpointFormat, Header
from .float4 import BLOCKS_MXFP4, GPT_OSS, MODELOPT_NVFP4, MXFP4, NVFP4
from .gptq import AWQ, GPTQ
from .grouped import GroupedWeight, StoredRows
from .packed_integers import MLX, PackedIntegers
from .scaled_bytes import ScaledBytes
from .stored import FP8, INT4, INT8, MODEL, WeightStorage, dequantise, quantise_int4

__all__ = [
    "FP8",
    "INT4",
    "INT8",
    "MODEL",
    "QUANT_METHODS",
    "STORAGES",
    "CheckpointFormat",
    "GroupedWeight",
    "Header",
    "StoredRows",
    "WeightStorage",
    "checkpoint_formats",
    "dequantise",
    "quantise_int4",
]

STORAGES = {storage.name: storage for storage in (MODEL, INT8, FP8, INT4)}
"""By name."""

Settings = Mapping[str, Any]
Formats = tuple[CheckpointFormat, ...]


def checkpoint_formats(settings: Settings) -> Formats:
    """Return the formats that weights of a checkpoint may have.

    Which of them a weight has, or none, is found from its tensors (`CheckpointFormat.shape`).

    Args:
        settings: `quantization_config` of its `config.json`.

    Raises:
        ValueError: it names another method, or a variant that is not read; the message says which.
    """
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in QUANT_METHODS:
        raise ValueError(f"quant_method = {method!r:.60}")
    for (name, key), allowed in _ALLOWED.items():
        if name == method:
            _allow(settings, key, *allowed)
    return QUANT_METHODS[method](settings)


def _allow(settings: Settings, key: str, *allowed: object) -> None:
    if (value := settings.get(key)) is not None and value not in allowed:
        shown = ", ".join(map(repr, allowed))
        raise ValueError(f"{key} = {value!r:.60}, and only {shown} is read")


def _group_sizes(settings: Settings) -> tuple[int, ...]:
    """Return every `group_size` in settings, also of some modules, in ascending order."""
    sizes, rest = set[int](), [settings]
    while rest:
        found = rest.pop()
        rest += [inner for inner in found.values() if isinstance(inner, Mapping)]
        if type(size := found.get("group_size")) is int and size > 0:
            sizes.add(size)
    return tuple(sorted(sizes))


def _scaled(settings: Settings) -> Formats:
    block = settings.get("weight_block_size") or []
    if not isinstance(block, list) or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"weight_block_size = {block!r:.60}, which is not [rows, columns]")
    block = tuple(block)
    return ScaledBytes(".weight_scale_inv", block), ScaledBytes(".weight_scale", block)


def _compressed(settings: Settings) -> Formats:
    if isinstance(sparsity := settings.get("sparsity_config"), Mapping):
        _allow(sparsity, "format", "dense")
    if settings.get("transform_config"):
        raise ValueError("transform_config, rotations of weights")
    return PackedIntegers(_group_sizes(settings)), NVFP4, MXFP4, ScaledBytes(".weight_scale")


def _gptq(settings: Settings) -> Formats:
    layout = settings.get("format") or settings.get("checkpoint_format") or "gptq"
    reordered, sizes = settings.get("desc_act") is True, _group_sizes(settings)
    return (GPTQ(sizes, int(layout == "gptq"), reordered),)


def _auto_round(settings: Settings) -> Formats:
    sizes = _group_sizes(settings)
    integers = AWQ(sizes), GPTQ(sizes), PackedIntegers(sizes)
    return *integers, NVFP4, MXFP4, ScaledBytes(".weight_scale")


def _bitsandbytes(settings: Settings) -> Formats:
    if settings.get("load_in_4bit"):
        _allow(settings, "bnb_4bit_quant_type", "nf4")
    return BitsAndBytes(), ScaledBytes(".SCB")


_GPTQ_LAYOUTS = ("gptq", "gptq_v2")
_ALLOWED: Mapping[tuple[str, str], tuple[object, ...]] = {
    ("fp8", "fmt"): ("e4m3", "float8_e4m3fn"),
    ("mxfp8", "fmt"): ("e4m3", "float8_e4m3fn"),
    ("compressed-tensors", "format"): (
        *("dense", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision"),
        *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
    ),
    ("modelopt", "quant_algo"): (
        *("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8", "MIXED_PRECISION"),
    ),
    ("awq", "bits"): (4,),
    ("awq", "version"): ("gemm",),
    ("gptq", "bits"): (2, 4, 8),
    ("gptq", "checkpoint_format"): _GPTQ_LAYOUTS,
    ("gptq", "format"): _GPTQ_LAYOUTS,
    ("auto-round", "packing_format"): (
        *("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"),
    ),
    ("mlx", "mode"): ("affine",),
}
"""The values that are read of a setting of a `quant_method`; settings may be left out."""
QUANT_METHODS: Mapping[str, Callable[[Settings], Formats]] = {
    "fp8": _scaled,
    "compressed-tensors": _compressed,
    "modelopt": lambda settings: (MODELOPT_NVFP4, *_scaled({})),
    "awq": lambda settings: (AWQ(_group_sizes(settings)),),
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda settings: (BLOCKS_MXFP4, GPT_OSS),
    "mxfp8": _scaled,
    "mlx": lambda settings: (MLX(settings),),
}
"""The formats of each `quant_method`; `mlx` and `modelopt` stand for checkpoints that say it in
another way."""
