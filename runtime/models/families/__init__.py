"""The supported decoder families.

A family is data: the traits of its layers, and the defaults of transformers for absent keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...bounded_repr import bounded_repr, bounded_text
from ...errors import CheckpointError
from ..config_keys import Json
from . import dense, gemma, hybrid, mixtures
from .family import Family

FAMILIES: dict[str, Family] = {
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **mixtures.FAMILIES,
    **hybrid.FAMILIES,
}
"""By `model_type`. As in transformers, `attn_logit_softcapping` is ignored for Gemma 3, attention
biases are ignored for Mistral, and only the logits of the Gemmas are capped."""


# Models of images and text, of which the text is decoded.

_WRAPPERS = frozenset(
    {
        *("aya_vision", "cohere2_vision", "gemma3", "gemma3n", "gemma4", "gemma4_unified"),
        "idefics3",
        *("internvl", "kimi_k25", "kimi_vl", "lfm2_vl", "llama4", "llava", "llava_next"),
        *("llava_onevision", "minimax_m3_vl", "mistral3", "mistral_large4", "muse_glimmer"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        *("smolvlm", "step3p7"),
    }
)
"""Model types whose `text_config` describes a decoder that does not differ in prompts of text."""
_SAME_TEXT = {
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The families of decoders with model types of their own. The positions of a text are the same in
the three dimensions of rotations of images (M-RoPE), so these are plain rotations."""


_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_DEFAULT_SIZES: Mapping[str, Json] = {
    model_type: dict(zip(_SIZE_KEYS, sizes, strict=True))
    for model_type, sizes in (
        ("gemma3_text", (262208, 2304, 9216, 26, 8, 4, 256, 131072)),
        ("llama", (32000, 4096, 11008, 32, 32, None, None, 2048)),
        ("mistral", (32000, 4096, 14336, 32, 32, 8, None, 131072)),
    )
}
"""Defaults of transformers, which the `text_config` of Gemma 3 and of LLaVA leaves out."""


def is_wrapper(config: Json) -> bool:
    """Whether a `config.json` is of a model of images and text."""
    return str(config.get("model_type")) in _WRAPPERS


def text_part(config: Json) -> Json:
    """Return the config of the decoder of text that a `config.json` describes: itself, if it is of
    a model of text.

    What the outer object says of all of the model counts first, such as tied embeddings.
    """
    inner, outer_type = config.get("text_config"), config.get("model_type")
    wrapped = is_wrapper(config)
    if not wrapped and str(outer_type) not in _SAME_TEXT:
        return config
    inner = inner if wrapped and isinstance(inner, Mapping) else {}
    sizes = _DEFAULT_SIZES.get(str(inner.get("model_type")), {})
    text = {**sizes, **config, **inner}
    text |= {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    text["model_type"] = _SAME_TEXT.get(str(text.get("model_type")), text.get("model_type"))
    if (family := FAMILIES.get(text["model_type"])) is not None:
        text["architectures"] = [family.architecture]
    if inner.get("model_type") == "qwen3_vl_moe_text":
        text["norm_topk_prob"] = True
        text.setdefault("num_experts", inner.get("num_local_experts"))  # as transformers writes it
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(name), Mapping):
            text[name] = {k: "default" if v == "mrope" else v for k, v in rope.items()}
    return text


_OF_THE_WHOLE = (
    *("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"),
    *("bos_token_id", "eos_token_id"),
)


_UNSUPPORTED = {
    "index_topk": "sparse attention",
    "index_topk_blocks": "sparse attention",
    "indexer_budget": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
}
"""Keys that configure what no operation computes: attention to tokens or blocks that an indexer
chooses (DeepSeek V3.2, arXiv 2512.02556), and several residual streams (arXiv 2409.19606)."""


def _unsupported_features(config: Json) -> str:
    """Return which features of `_UNSUPPORTED` a `config.json` or its `text_config` asks for."""
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, Mapping) else {})
    keys = {f: key for key, f in _UNSUPPORTED.items() if any(part.get(key) for part in parts)}
    return " and ".join(f"{feature} ({key})" for feature, key in keys.items())


def family_of(config: Json) -> tuple[str, Family]:
    """Return the model type of a `config.json` and its family. Raises `CheckpointError`."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    supported = None if family is None else family.architecture
    architectures = config.get("architectures")
    # Checkpoints name the class they were saved from; a bare config has only the model type.
    named = architectures if isinstance(architectures, list) and architectures else [supported]
    if family is None or supported not in named:
        found = ", ".join(bounded_text(name, 60) for name in named[:3] if name) or "(unnamed)"
        if features := _unsupported_features(config):
            why = f": it has {features}, which no layer of stepgraph computes"
        else:
            why = "; supported: " + ", ".join(family.architecture for family in FAMILIES.values())
        raise CheckpointError(
            f"architecture {found} (model_type {bounded_repr(model_type, 60)}) is not supported"
            + why
        )
    return str(model_type), family
