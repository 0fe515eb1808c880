"""A model is made small by the words in its configuration's keys; what then does not run is undone step by step."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.helpers.tiny import settings_with
from zero_recipes.tools.rehearse import small
from zero_recipes.tools.rehearse.sizes import Sizes, entries_by_layer, widths

VOCABULARY = 512
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
# a configuration of each kind of trouble; values that are not given are the class's defaults, which are large
KINDS = {
    "latent attention": ("deepseek_v3", {}),
    "latent attention, an indexer": ("deepseek_v32", {}),
    "a width of heads for single layers": ("gemma4_text", {"vocab_size_per_layer_input": VOCABULARY}),
    "layers that share keys and values": (
        "gemma4_text",
        {
            "vocab_size_per_layer_input": VOCABULARY,
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        },
    ),
    "widths of a state space": ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 16}),
    "a list of widths": ("gemma3n_text", {"vocab_size_per_layer_input": VOCABULARY}),
    "parts of its own": (
        "dbrx",
        {
            "d_model": 2048,
            "n_heads": 16,
            "attn_config": {"kv_n_heads": 8, "rope_theta": 5e5},
            "ffn_config": {"hidden_size": 2048},
        },
    ),
    "layers by their period": ("jamba", {}),
    "layers by their numbers": ("mllama_text_model", {}),
}


def config_of(kind: str, **values) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **({"vocab_size": VOCABULARY} | IDS | values))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "layers by their numbers"])
def test_a_model_is_narrow_and_runs(name, monkeypatch):
    kind, values = KINDS[name]
    config = config_of(kind, **values)
    settings = settings_with(model_name_or_path=name, random_weights=True, dtype="float32")
    model, cuts = small.narrowest_that_runs(config, settings)
    assert not any("does not run" in cut for cut in cuts), cuts
    whole = Sizes(config)
    made = Sizes(model.config)
    assert made.layers() < whole.layers() and made._get("hidden_size") * 4 <= whole._get("hidden_size")
    assert model.num_parameters() < 20_000_000
    # what is written is what was tried
    again = AutoModelForCausalLM.from_config(type(model.config).from_dict(model.config.to_dict()))
    assert {name: p.shape for name, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_every_kind_of_layer_stays():
    jamba = config_of("jamba", num_experts=4)
    few = small.with_fewer_layers(jamba, 2)
    assert few.cuts == ["8 of 32 layers"], "attention comes once in eight layers, experts in every second"
    mllama = config_of("mllama_text_model")
    sizes = Sizes(mllama)
    assert sizes.cut_layers(2) == ["2 of 40 layers"]
    assert sizes.config().cross_attention_layers == [1]
    gemma = config_of(*KINDS["layers that share keys and values"][:1], **KINDS["layers that share keys and values"][1])
    sizes = Sizes(gemma)
    assert sizes.cut_layers(2) == ["4 of 10 layers"]
    cut = sizes.config()
    assert cut.layer_types == ["sliding_attention", "full_attention"] * 2 and cut.num_kv_shared_layers == 2
    # full attention is wider in this class: its second and fourth layer stay so
    assert [layer.head_dim for layer in cut.per_layer_config] == [256, 512, 256, 512]


def test_lists_that_say_nothing_of_a_kind():
    assert entries_by_layer({"moe_layers": [0, 1, 2, 3]}, 4) == {"moe_layers": [True] * 4}
    assert entries_by_layer({"full_attn_idxs": [0, 1, 2, 3]}, 4) == {"full_attn_idxs": [True] * 4}
    assert entries_by_layer({"mrope_section": [24, 20, 20]}, 4) == {}
    assert entries_by_layer({"first_k_dense_replace": 1}, 3) == {"first_k_dense_replace": [True, False, False]}


def test_widths_are_known_by_their_names():
    values = {"hidden_size": 64, "q_lora_rank": 8, "qk_rope_head_dim": 4, "moe_intermediate_size": [8, 8], "n_embd": 4}
    others = {"vocab_size": 512, "sliding_window": 8, "mamba_d_conv": 4, "num_attention_heads": 2, "hidden_act": "silu"}
    others |= {"n_group": 8, "hidden_dropout": 0.1, "max_position_embeddings": 64, "mamba_d_state": 16, "chunk_size": 8}
    assert dict(widths(values | others)) == values


def test_what_does_not_run_narrow_keeps_its_width_and_says_so(monkeypatch):
    config = config_of("llama", num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    settings = settings_with(model_name_or_path="llama", random_weights=True, dtype="float32")
    tried = []

    def refuse_narrow(model):
        tried.append(model.config.hidden_size)
        if model.config.hidden_size < 128:
            raise RuntimeError(f"{model.config.hidden_size} is too narrow")

    monkeypatch.setattr(small, "try_forward", refuse_narrow)
    model, cuts = small.narrowest_that_runs(config, settings)
    assert tried == sorted(tried) and tried[-1] == 128 == model.config.hidden_size
    assert cuts == ["2 of 4 layers", "hidden size 128 of 256, every width divided by 2"]

    def refuse_all(model):
        raise RuntimeError(f"{model.config.hidden_size} {model.config.intermediate_size} is too narrow")

    monkeypatch.setattr(small, "try_forward", refuse_all)
    model, cuts = small.narrowest_that_runs(config, settings)
    assert model.config.hidden_size == 256 and cuts[-1] == "its width kept: made narrower it does not run"


def test_an_error_that_is_not_about_the_width_is_left_to_the_launches(monkeypatch):
    config = config_of("llama", num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    settings = settings_with(model_name_or_path="llama", random_weights=True, dtype="float32")

    def lacks_a_package(model):
        raise ImportError("needs a package")

    monkeypatch.setattr(small, "try_forward", lacks_a_package)
    model, cuts = small.narrowest_that_runs(config, settings)
    assert model.config.hidden_size < 128 and "heads" in cuts[-1]


def test_a_tower_hands_over_the_new_width():
    values = {"text_config": {"hidden_size": 2048, "num_hidden_layers": 8}, "vision_config": {"out_hidden_size": 2048}}
    config = AutoConfig.for_model("qwen3_5", **values)
    few = small.with_fewer_layers(config, 2)
    narrow = next(small.narrower_configs(few, shares=2)).config
    assert narrow.vision_config.out_hidden_size == narrow.text_config.hidden_size < 2048


def test_the_trial_reaches_every_layer():
    config = config_of("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(1))
    small.try_forward(model)
    assert len(seen) == 2 and model.training and all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
