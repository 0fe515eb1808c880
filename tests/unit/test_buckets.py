"""What the model decides of a ds_config: bucket sizes and leaf modules, in the plan as in a run."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.helpers.plan_jobs import job, recipe
from tests.helpers.tiny import ROOT
from zero_recipes.config.ds_config import COPIES, LINEAR, ModelSize, fill_own_autos
from zero_recipes.config.strategy import resolve_strategy
from zero_recipes.model.build import build_on_meta
from zero_recipes.model.meta import decoder_layers, size_of
from zero_recipes.tools.plan.job import job_of, known_models

MARKED = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
BLOCK = 12 * 3200**2  # of OpenLLaMA-3B, whose largest tensor, the embedding of 32,000 words, is smaller
# {model: (elements of a bucket on GPUs, on CPUs)}
MODELS = {
    "Qwen/Qwen2.5-0.5B": (151936 * 896, 50_000_000),  # the embedding; on CPUs the upper bound
    "HuggingFaceTB/SmolLM2-1.7B": (49152 * 2048, 50_000_000),
    "EleutherAI/pythia-410m-deduped": (50304 * 1024, 50_000_000),
    "EleutherAI/pythia-6.9b-deduped": (200_000_000, 50_000_000),
    "meta-llama/Llama-2-7b-hf": (200_000_000, 50_000_000),  # a block has 201 million, the embedding 131 million
}
LAYERS = {"qwen2": "Qwen2DecoderLayer", "llama": "LlamaDecoderLayer", "gpt_neox": "GPTNeoXLayer"}


def sizes_in(config) -> tuple[int, int]:
    return tuple(config["zero_optimization"][key] for key in KEYS)


def filled(size, config=None, world_size: int = 2, **keys) -> dict:
    sized = size and ModelSize(*size)
    return fill_own_autos(config or MARKED, recipe("tiny").settings.replace(**keys), world_size, {}, lambda: sized)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_and_its_plan_have_buckets_as_large_as_the_models_block_or_largest_tensor(name, tmp_path):
    config = known_models()[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ds.json").write_text(json.dumps(MARKED))
    for use_cpu, elements in zip((False, True), MODELS[name], strict=True):
        keys = {"model_name_or_path": str(tmp_path), "deepspeed": str(tmp_path / "ds.json"), "use_cpu": use_cpu}
        run = resolve_strategy(recipe("pythia").settings.replace(**keys), {"WORLD_SIZE": "2"}, size_of)
        planned = job_of(recipe("pythia"), config, "zero3", MARKED, 2, device="cpu" if use_cpu else "gpu").ds_config
        assert sizes_in(run.ds.raw) == sizes_in(planned) == (elements, elements)
        assert run.ds.raw == planned and run.ds.zero["leaf_module"]["classes"] == [LAYERS[config["model_type"]]]


def test_the_bounds_and_what_has_little_to_reduce():
    assert sizes_in(filled((3200, 32000 * 3200))) == (BLOCK, BLOCK)
    assert sizes_in(filled((64, 1000))) == (25_000_000, 25_000_000)
    assert sizes_in(filled((64, 1000), use_cpu=True)) == (6_250_000, 6_250_000)
    assert sizes_in(filled(None)) == (50_000_000, 50_000_000)
    for keys in ({"use_peft": True}, {"world_size": 1}):
        assert sizes_in(filled((3200, 1000), **keys)) == (25_000_000, BLOCK)
    lora = job("zero2").changed(use_peft=True).under("zero2", MARKED)
    assert sizes_in(lora.ds_config) == (25_000_000, 200_000_000)


def test_the_rule_holds_where_the_mark_is_and_for_what_is_auto():
    assert "bucket_sizes" not in filled((3200, 1000)) and "bucket_sizes" in MARKED, "a copy is filled"
    unmarked = {key: value for key, value in MARKED.items() if key not in ("bucket_sizes", "leaf_modules")}
    for own in (unmarked | {"bucket_sizes": "fixed"}, unmarked):
        assert filled((3200, 1000), own) == own
    edited = MARKED | {"zero_optimization": MARKED["zero_optimization"] | {"reduce_bucket_size": 500_000}}
    assert sizes_in(filled((3200, 1000), edited)) == (500_000, BLOCK)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_each_file_of_ours_with_buckets_has_them_by_the_model(path: Path):
    config = json.loads(path.read_text())
    sizes = [filled((3200, 1000), config)["zero_optimization"].get(key) for key in KEYS]
    on_nvme = "nvme" in json.dumps(config)
    stage = config["zero_optimization"]["stage"]
    assert sizes == [BLOCK if stage else None, 0 if on_nvme else BLOCK if stage == 3 else None]


def test_layers_are_leaf_modules_where_the_mark_is_and_a_file_names_none():
    size = (64, 1000, ("LlamaDecoderLayer",))
    leaf = {"classes": ["LlamaDecoderLayer"]}
    marked = {"leaf_modules": "by_model"}
    own = {"classes": ["LlamaMLP"]}

    def of(**zero):
        config = filled(size, marked | {"zero_optimization": {"stage": 3} | zero})
        assert "leaf_modules" not in config
        return config["zero_optimization"].get("leaf_module")

    assert of() == of(offload_param={"device": "cpu"}) == leaf
    assert of(leaf_module=own) == own
    assert of(offload_param={"device": "nvme"}) is None, "each tensor of a layer would take a buffer"
    assert of(stage=2) is None
    unmarked = {"zero_optimization": {"stage": 3}}
    assert filled(size, unmarked) == unmarked
    assert "leaf_module" not in filled((64, 1000))["zero_optimization"], "a model without such layers"


def test_stage_3_has_torchs_linear_layers_where_weights_stay_until_backward_anyway():
    """A layer that is computed again, or a model whose weights stay gathered: twice its elements are not too far."""
    marked = {"leaf_modules": "by_model"}

    def of(elements: int, recomputes: bool, **zero):
        config = marked | {"zero_optimization": {"stage": 3} | zero}
        size = (64, 1000, ("LlamaDecoderLayer",), elements)
        return filled(size, config, activation_checkpointing=recomputes)["zero_optimization"].get(LINEAR)

    assert of(500_000_000, recomputes=False) is False
    assert of(500_000_001, recomputes=False) is None
    assert of(500_000_001, recomputes=True) is False
    assert of(51, recomputes=False, stage3_max_reuse_distance=100) is None
    assert of(51, recomputes=True, memory_efficient_linear=True) is True
    assert of(51, recomputes=True, offload_param={"device": "nvme"}) is None


def test_gradients_are_copied_side_by_side_where_they_are_sent_from_there():
    def of(stage: int, world_size: int, **zero):
        config = {"bucket_sizes": "by_model", "zero_optimization": {"stage": stage} | zero}
        return filled((64, 1000), config, world_size)["zero_optimization"].get(COPIES)

    assert of(2, world_size=1) is of(3, world_size=1) is of(3, world_size=2) is False
    assert of(2, world_size=2) is None
    assert of(2, world_size=1, offload_optimizer={"device": "cpu"}) is None
    assert of(3, world_size=2, contiguous_gradients=True) is True


def test_the_decoders_layers_are_found():
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text |= {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    seeing = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    assert decoder_layers(build_on_meta(seeing)) == ("Gemma3DecoderLayer",), "rows of text never reach the others"
    model = build_on_meta(AutoConfig.for_model("llama", **text))
    assert decoder_layers(model) == ("LlamaDecoderLayer",)
    model.model.layers[1] = model.model.layers[0]
    assert decoder_layers(model) == (), "shared weights have their gradients once the first layer is through"


def test_one_process_copies_no_gradients_side_by_side():
    def copies(name: str, world_size: int, **zero) -> bool | None:
        config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        config["zero_optimization"] |= zero
        return filled((64, 1000), config, world_size)["zero_optimization"].get("contiguous_gradients")

    for name in ("zero1", "zero2", "zero2_autocast", "zero2_bf16_states"):
        assert copies(name, 1) is False and copies(name, 2) is None
    assert copies("zero2", 1, contiguous_gradients=True) is True
    assert copies("zero2_offload", 1) is True, "DeepSpeed needs them there"
