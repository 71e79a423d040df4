"""Sizes of small models of transformers, by the names of fields of configurations.

`SIZES` gives each size a small value, `EXCEPTIONS` what a model type needs besides.
"""

from __future__ import annotations

import json
from typing import Any

VOCAB_SIZE = 101
HIDDEN, HEADS, HEAD_DIM, EXPERT_FEATURES = 48, 4, 16, 40

_NAMES = f"""
{HIDDEN} hidden_size d_model n_embd dim_model emb_dim embedding_dim embedding_size lru_width
{HIDDEN} input_embedding_size word_embed_proj_dim
56 output_embedding_size
80 intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff ffn_hidden_size dim_ff
80 d_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size
{EXPERT_FEATURES} moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
{EXPERT_FEATURES} shared_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
{HEADS} num_attention_heads n_head n_heads num_heads attention_heads num_query_groups
{HEADS} decoder_attention_heads encoder_attention_heads num_encoder_attention_heads
{HEADS} num_decoder_attention_heads swa_num_attention_heads
2 num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_global_key_value_heads
{HEAD_DIM} head_dim kv_channels dim_head d_kv d_head global_head_dim swa_head_dim
{HEAD_DIM} attention_head_dim swa_v_head_dim
3 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers
3 num_encoder_layers num_decoder_layers
{VOCAB_SIZE} vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input
128 max_position_embeddings n_positions n_ctx max_target_positions max_source_positions
128 context_length max_seq_len
32 original_max_position_embeddings
7 sliding_window window_size attention_window_size
8 local_attention attention_chunk_size sliding_window_size
1 max_window_layers
8 num_experts num_local_experts n_routed_experts moe_num_experts moe_num_primary_experts
2 num_experts_per_tok moe_topk moe_k top_k_experts moe_top_k num_experts_per_token topk_group
4 n_group num_expert_group
1 first_k_dense_replace
20 q_lora_rank
18 kv_lora_rank
10 qk_nope_head_dim
6 qk_rope_head_dim
16 qk_head_dim index_head_dim
12 v_head_dim hidden_size_per_layer_input
2 index_n_heads
8 index_topk
8 mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size
6 mamba_n_heads mamba_num_heads n_mamba_heads
16 mamba_d_head mamba_head_dim mamba_headdim
2 linear_num_key_heads
4 linear_num_value_heads time_step_rank
8 linear_key_head_dim linear_value_head_dim rotary_dim
0.7 logit_scale
3.0 attn_logit_softcapping
7.0 final_logit_softcapping
24 query_pre_attn_scalar
0 pad_token_id
1 bos_token_id
2 eos_token_id
"""
"""A value and the names that it has. Prompts exceed the windows, and soft caps matter."""
SIZES: dict[str, Any] = {
    name: json.loads(value)
    for value, *names in map(str.split, _NAMES.strip().splitlines())
    for name in names
}
"""Values of fields by name, in a configuration and in those within it."""

_HYBRID_GEMMA = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
_LATENT_GROUPS = {"n_group": 4, "topk_group": 2}
_QWEN4 = {
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 4,
    "heads_per_ngram": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_BLT = dict.fromkeys(
    ("encoder_config.hidden_size_global", "decoder_config.hidden_size_global"), HIDDEN
)
_DOTS3 = {
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 14,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 14,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 10,
    "shared_experts_intermediate_size": EXPERT_FEATURES,
    "sliding_window": 7,
}
_PLACEHOLDERS = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), VOCAB_SIZE)
"""Tokens that the text model would take for images, if it generated them."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": _BLT | {"encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 3},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": _LATENT_GROUPS | {"num_experts_per_tok": 2},
    "dots1": _LATENT_GROUPS
    | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config.mlp_layer_types": ["dense"] * 3,
        "vision_config.adapter_in_dim": HIDDEN,
        "vision_config.adapter_out_dim": HIDDEN,
        "audio_config.adapter_input_size": HIDDEN,
        "audio_config.adapter_out_dim": HIDDEN,
        **{f"text_config.{key}": value for key, value in _DOTS3.items()},
    },
    "dots3_note_text": _DOTS3,
    "falcon_h1": {"mamba_d_ssm": 96},
    "gemma3": {"image_token_index": VOCAB_SIZE - 1},
    "gemma3n_text": _HYBRID_GEMMA | {"activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4},
    "gemma4": _PLACEHOLDERS,
    "gemma4_unified": {
        **_PLACEHOLDERS,
        **dict.fromkeys(("vision_config.mm_embed_dim", "vision_config.output_proj_dims"), HIDDEN),
        "vision_config.mm_posemb_size": 16,
        "vision_config.patch_size": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "helium": {"head_dim": HIDDEN // HEADS},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2, "head_dim": 6},
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]},
    "ministral": {"head_dim": HEAD_DIM},
    # Its generate drops tokens out of the window, its mask does not: the window is not reached.
    "moshi": {"audio_vocab_size": 40, "sliding_window": 128},
    # transformers clamps time steps to `time_step_min` in prefills only.
    "nemotron_h": {"n_groups": 2, "time_step_min": 1e-9},
    # Its generate drops the cache at this length.
    "phi4_multimodal": {"original_max_position_embeddings": 128},
    "qwen4_exp": {f"text_config.{key}": value for key, value in _QWEN4.items()},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": (8, 16),
        "axial_pos_embds_dim": (16, 32),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB_SIZE,
        "pronunciation_embed_dim": 8,
        "shape_vocab_size": VOCAB_SIZE,
        "shape_embed_dim": 8,
    },
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
    },
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0, "chunk_size": 64},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 12},
}
"""Further fields of a model type; a `NESTED.NAME` is one of the configuration within."""

_DRAFTS = "a draft model that reads keys and values of another model"
_DECODER = "part of an audio model: its configuration is that of the whole, which the class refuses"
_NESTED = "transformers saves the nested text configuration, which AutoModelForCausalLM refuses"
UNBUILDABLE: dict[str, str] = {
    "emu3": _NESTED,
    "mllama": _NESTED,
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the language model",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _DECODER,
    "musicgen_melody": _DECODER,
}
"""Model types without a small model, with the reason."""
