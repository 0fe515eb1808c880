"""Configurations of small models: experts, shared experts, linear attention and Mamba."""

from transformers import AutoConfig, MixtralConfig

from tests.helpers.tiny import llama_config

SIZES = {"vocab_size": 1031, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR_ATTENTION |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8}
MODELS = {
    "llama": llama_config(),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": AutoConfig.for_model("qwen3_moe", **SIZES, **ROUTED, head_dim=8, num_experts=4),
    "glm4_moe_lite": AutoConfig.for_model(
        "glm4_moe_lite", **SIZES | {"num_key_value_heads": 4}, **ROUTED, **LATENT, n_routed_experts=4, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    ),
    "qwen3_5_moe_text": AutoConfig.for_model(
        "qwen3_5_moe_text", **SIZES, **ROUTED, **LINEAR_ATTENTION, head_dim=8, num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    "nemotron_h": AutoConfig.for_model(
        "nemotron_h", **SIZES | {"num_hidden_layers": 4}, **ROUTED, **MAMBA, head_dim=8, n_routed_experts=4, n_group=1,
        topk_group=1, layer_types=["mamba", "moe", "attention", "mlp"],
    ),
    "bamba": AutoConfig.for_model(
        "bamba", **SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, attn_layer_indices=[1],
    ),
}  # fmt: skip
