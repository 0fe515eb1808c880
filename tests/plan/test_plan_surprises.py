"""What textbooks do not say and the simulated engine shows by itself, on the device that stands for a GPU."""

from dataclasses import replace

import pytest

from tests.helpers.compared_jobs import job_of, write_recipe
from tests.helpers.tiny import write_model
from zero_recipes.metrics.schema import Prediction
from zero_recipes.plan.simulator import parent as simulation

TWICE = {"gradient_accumulation_steps": 2}
ALONE = {"bf16": False, "dtype": "bfloat16", "activation_checkpointing": True, "max_length": 16}
ASKED = {
    "stage 0": ("zero0", {}, {}),
    "stage 2": ("zero2", {}, {}),
    "stage 3": ("zero3", {}, {}),
    "stage 3, fp16": ("zero3", {"fp16": True, "bf16": False}, {}),
    "stage 2, autocast": ("zero2_autocast", {"bf16": False}, {}),
    "stage 1, two micro steps": ("zero1", TWICE, {}),
    "stage 1, two micro steps, fp32 sums": ("zero1", TWICE, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "adamw_torch": ("single", ALONE | {"optim": "adamw_torch"}, None),  # in pure bf16, without DeepSpeed
    "adamw_torch_fused": ("single", ALONE | {"optim": "adamw_torch_fused"}, None),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, Prediction]:
    root = tmp_path_factory.mktemp("surprises")
    model = write_model(root / "neox", hidden=96, intermediate=203)
    jobs = []
    for case, (strategy, keys, ds_keys) in ASKED.items():
        folder = root / case
        folder.mkdir()
        job = job_of(write_recipe(folder, model, keys), model, strategy, 1 if ds_keys is None else 2)
        jobs.append(replace(job, device="gpu", ds_config=None if ds_keys is None else job.ds_config | ds_keys))
    return dict(zip(ASKED, simulation.simulate(jobs), strict=True))


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


def test_fp16_takes_what_bf16_takes_and_autocast_keeps_weights_in_fp32(planned):
    assert planned["stage 3, fp16"].allocated_peak_bytes == planned["stage 3"].allocated_peak_bytes
    autocast = planned["stage 2, autocast"]
    assert autocast.precision == "bf16"
    assert autocast.model_state_bytes.params == pytest.approx(4 * autocast.parameters, rel=0.01)


def test_plain_adam_holds_a_list_as_large_as_the_weights_on_one_gpu(planned):
    """torch/optim/adam.py `_multi_tensor_adam`, the default on CUDA; fused Adam holds none. No DDP buckets either."""
    peaks = [planned[optim].peaks["step"] / planned[optim].parameters for optim in ("adamw_torch", "adamw_torch_fused")]
    assert peaks == pytest.approx([10, 8], rel=0.03)
