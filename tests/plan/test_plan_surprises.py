"""What textbooks do not say and the simulated engine shows by itself, on the device that stands for a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.compared_jobs import job_of, write_recipe
from tests.helpers.tiny import write_model
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.plan.simulator import parent as simulation

HALF = {"fp16": True, "bf16": False}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
ASKED = {
    "stage 0": ("zero0", {}, {}),
    "stage 2": ("zero2", {}, {}),
    "stage 3": ("zero3", {}, {}),
    "stage 2, fp16": ("zero2", HALF, {}),
    "stage 3, fp16": ("zero3", HALF, {}),
    "stage 1, two micro steps": ("zero1", {"gradient_accumulation_steps": 2}, {}),
    "stage 1, two micro steps, fp32 sums": ("zero1", {"gradient_accumulation_steps": 2}, FP32_SUMS),
}

PLAIN = ("adamw_torch", "adamw_torch_fused")


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, Prediction]:
    root = tmp_path_factory.mktemp("surprises")
    model = write_model(root / "neox", hidden=96, intermediate=203)
    jobs = []
    for case, (strategy, keys, ds_keys) in ASKED.items():
        folder = root / case
        folder.mkdir()
        job = job_of(write_recipe(folder, model, keys), model, strategy)
        jobs.append(replace(job, device="gpu", ds_config=job.ds_config | ds_keys))
    jobs += [one_gpu(root, model, optim) for optim in PLAIN]
    return dict(zip((*ASKED, *PLAIN), simulation.simulate(jobs), strict=True))


def one_gpu(root, model, optim: str):
    """Full fine-tuning in pure bf16, without DeepSpeed."""
    folder = root / optim
    folder.mkdir()
    keys = {"optim": optim, "bf16": False, "dtype": "bfloat16", "activation_checkpointing": True, "max_length": 16}
    job = job_of(write_recipe(folder, model, keys), model, "zero0")
    return replace(job, device="gpu", strategy="single", ds_config=None, world_size=1, gpus_per_node=1)


def test_stage_0_in_16_bits_takes_20_bytes_a_parameter(planned):
    states = planned["stage 0"].model_state_bytes
    per_parameter = {part: size / planned["stage 0"].parameters for part, size in states.model_dump().items() if size}
    assert per_parameter == pytest.approx({"params": 2, "grads": 6, "optimizer": 12}, rel=1e-3)


def test_a_higher_stage_can_take_more_than_a_lower_one(planned):
    """Stage 3 keeps so small a model gathered (stage3_param_persistence_threshold), beside its parts."""
    assert planned["stage 3"].allocated_peak_bytes > planned["stage 2"].allocated_peak_bytes


def test_sums_in_fp32_at_stage_1_are_whole_on_every_rank(planned):
    plain, summed = (planned[f"stage 1, two micro steps{case}"] for case in ("", ", fp32 sums"))
    psi = plain.parameters
    assert plain.at_peak["grads"] == pytest.approx(2 * psi, rel=0.02)
    assert summed.at_peak["grads"] == pytest.approx((2 + 4) * psi, rel=0.02)  # in bf16, and their sums
    assert summed.at_peak["optimizer"] == pytest.approx(plain.at_peak["optimizer"], rel=0.02)
    assert summed.allocated_peak_bytes > plain.allocated_peak_bytes + 3 * psi


@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_fp16_takes_what_bf16_takes(stage, planned):
    for key in ("allocated_peak_bytes", "model_state_bytes"):
        assert getattr(planned[f"{stage}, fp16"], key) == getattr(planned[stage], key)
    assert planned[f"{stage}, fp16"].precision == "fp16"


def test_plain_adam_holds_a_list_as_large_as_the_weights_on_one_gpu(planned):
    """torch/optim/adam.py `_multi_tensor_adam`, the default on CUDA; fused Adam holds none. No DDP buckets either."""
    peaks = {optim: planned[optim].peaks["step"] / planned[optim].parameters for optim in PLAIN}
    assert peaks == pytest.approx({"adamw_torch": 10, "adamw_torch_fused": 8}, rel=0.03)
