"""What DeepSpeed really sends, by stage and micro steps; the engine's own seconds; memory by phase."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.helpers.grid import grid
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.theory.deepspeed import explained, volume_terms
from zero_recipes.theory.zero_paper import PLUS_PLUS, communication_units, paper_volume, plus_plus_units

NEVER_KEPT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
NEVER_KEPT |= {"stage3_prefetch_bucket_size": 0}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("volume"))


@pytest.fixture(scope="module")
def measured(two, recipe, tmp_path_factory):
    """A function: metrics.json of a stage with keys of zero_optimization, micro steps and top-level keys."""

    done: dict[str, dict] = {}

    def run(stage: int, accumulation: int, zero: dict, **top) -> dict:
        asked = json.dumps([stage, accumulation, zero, top])
        if asked not in done:
            done[asked] = trained(stage, accumulation, zero, **top)
        return done[asked]

    def trained(stage: int, accumulation: int, zero: dict, **top) -> dict:
        config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text()) | top
        config["zero_optimization"] |= zero
        argv = [str(recipe), "--output_dir", str(tmp_path_factory.mktemp("out")), "--deepspeed", json.dumps(config)]
        argv += ["--gradient_accumulation_steps", str(accumulation), "--max_steps", "6"]  # stage 3 learns in the first
        return two.run("train", argv=argv)[0]["metrics"]

    return run


@pytest.mark.parametrize(
    ("stage", "accumulation", "zero", "terms"),
    [
        (0, 2, {}, {}),
        (1, 2, {}, {}),
        (1, 1, {"use_multi_rank_bucket_allreduce": False}, {"multi_rank_buckets": False}),
        (2, 2, {}, {}),
        grid(2, 2, {"use_multi_rank_bucket_allreduce": False}, {"multi_rank_buckets": False}),
        (3, 2, NEVER_KEPT, {"kept": False}),
        (3, 2, {"stage3_param_persistence_threshold": 0}, {}),
    ],
)
def test_each_step_sends_what_the_source_says(measured, stage, accumulation, zero, terms):
    metrics = measured(stage, accumulation, zero)
    phi = 2 * metrics["trainable_parameters"]
    wanted = sum(volume_terms(stage, accumulation, **terms).values())
    assert paper_volume(metrics["communication_bytes_per_step"]) / phi == pytest.approx(wanted, rel=0.02)


def test_the_textbooks_volume_has_the_textbooks_collectives(measured):
    """Without all-reduces over buckets of several ranks each part goes to its owner alone: 2Φ."""
    sent = measured(1, 1, {"use_multi_rank_bucket_allreduce": False})["communication_bytes_per_step"]
    assert sent["reduce"] + sent.get("all_reduce", 0) == pytest.approx(sent["all_gather"], rel=0.05)
    assert sum(volume_terms(1, 1, multi_rank_buckets=False).values()) == communication_units(1)


def test_terms_in_words():
    said = explained(volume_terms(2, 4))
    assert said == "8Φ (all-reduce of the gradients at every micro step) + 1Φ (gather of the parameters)"
    assert sum(volume_terms(3, 1, kept=False).values()) == communication_units(3)


def test_plus_plus_by_the_paper():
    units = {name: plus_plus_units(**parts) for name, parts in PLUS_PLUS.items()}
    assert units == {"zero3_hpz": 2, "zero3_qwz": 2, "zero3_qgz": 2.25, "zero3_plus_plus": 0.75}
    assert plus_plus_units(hpz=False, qwz=False, qgz=False) == communication_units(3)


def test_the_hosts_memory_after_each_phase(measured):
    metrics = measured(2, 1, {})
    assert list(metrics["host_memory_phases"]) == ["model_loaded", "engine_built", "forward", "backward", "step"]
    assert min(metrics["host_memory_phases"].values()) > 2**20


def test_a_warm_up_without_a_type_is_logarithmic():
    """Fails when DeepSpeed's default becomes linear: then drop the finding in checks/ds_config.py."""
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    def rates(**kind) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = WarmupDecayLR(optimizer, 100, warmup_max_lr=1.0, warmup_num_steps=10, **kind)
        found = []
        for _ in range(6):
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates()[5] == pytest.approx(math.log(6) / math.log(10))
    assert rates(warmup_type="linear")[5] == pytest.approx(0.5)
