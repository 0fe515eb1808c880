"""Small composite models: a text model beside a tower for images or sound, by the type of their configuration."""

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from zero_recipes.model.towers import auto_class

TEXT = {"vocab_size": 1031, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
TEXT |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SEEING = TOWER | {"image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
QWEN |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
HEARING = TOWER | {"head_dim": 16, "num_mel_bins": 8, "max_source_positions": 32}

SIZES = {
    "gemma3": {"text_config": TEXT, "vision_config": SEEING, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": TEXT
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 1031}
        | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
        "vision_config": TOWER | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
    },
    "qwen3_5": {"text_config": TEXT | LINEAR | ROPE, "vision_config": QWEN | {"deepstack_visual_indexes": []}},
    "qwen3_vl": {"text_config": TEXT | ROPE, "vision_config": QWEN},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SEEING | {"model_type": "pixtral", "head_dim": 16},
    },
    "llava_next": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SEEING | {"model_type": "clip_vision_model"},
    },
    "voxtral": {"text_config": TEXT | {"model_type": "llama"}, "audio_config": HEARING},
}


def composite_config(kind: str):
    """The configuration of a small model. Tokens that stand for an image or a sound are ones that no row has."""
    config = AutoConfig.for_model(kind, **SIZES[kind])
    number = TEXT["vocab_size"]
    for key, value in vars(config).items():
        if key.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 1:
            number -= 1
            setattr(config, key, number)
    return config


def composite_model(kind: str) -> PreTrainedModel:
    """A small model with random weights, in fp32."""
    torch.manual_seed(0)
    return auto_class(composite_config(kind)).from_config(composite_config(kind), dtype=torch.float32)


def write_composite(kind: str, folder: Path) -> PreTrainedModel:
    """Save a small model where tests/helpers/tiny.py `write_recipe` has put another one. Returns it."""
    model = composite_model(kind)
    (folder / "config.json").unlink()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}\n')
    return model
