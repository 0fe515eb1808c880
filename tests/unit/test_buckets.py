"""Bucket sizes by the model: the rule for real models, in the plan as in a run, and where the rule holds."""

import json
from pathlib import Path

import pytest

from tests.helpers.plan_jobs import job, recipe
from tests.helpers.tiny import ROOT
from zero_recipes.config.ds_config import fill_own_autos
from zero_recipes.config.strategy import resolve_strategy
from zero_recipes.model import size_of
from zero_recipes.tools.plan.job import job_of, known_models
from zero_recipes.tools.sweep import runs_of

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


def sizes_in(config) -> tuple[int, int]:
    return tuple(config["zero_optimization"][key] for key in KEYS)


def filled(size, config=None, world_size: int = 2, **keys) -> dict:
    return fill_own_autos(config or MARKED, recipe("tiny").settings.replace(**keys), world_size, {}, lambda: size)


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
    for own in ({**MARKED, "bucket_sizes": "fixed"}, {k: v for k, v in MARKED.items() if k != "bucket_sizes"}):
        assert filled((3200, 1000), own) == own
    paths = {"zero3": ROOT / "accelerate_configs" / "zero3.yaml"}
    (edited,) = runs_of(paths, {"zero3": MARKED}, ["zero_optimization.reduce_bucket_size=5e5"], [])
    assert sizes_in(filled((3200, 1000), edited.ds_config)) == (500_000, BLOCK)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_each_file_of_ours_with_buckets_has_them_by_the_model(path: Path):
    config = json.loads(path.read_text())
    sizes = [filled((3200, 1000), config)["zero_optimization"].get(key) for key in KEYS]
    on_nvme = "nvme" in json.dumps(config)
    stage = config["zero_optimization"]["stage"]
    assert sizes == [BLOCK if stage else None, 0 if on_nvme else BLOCK if stage == 3 else None]
