"""Measured model-state bytes equal what DeepSpeed allocates, to the byte, and name every deviation from the paper."""

import json
from pathlib import Path

import pytest

from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.state_terms import AUTOCAST, BF16_STATES, model_state_terms
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.engine.deepspeed import STATE_PARTS

BUCKET = 6_250_000  # elements: reduce_bucket_size of a small model on CPUs
SMALL = 64 * 64  # smaller than some tensors
ENGINES = {
    "ddp": "DistributedDataParallel",
    "zero0": "FP16_UnfusedOptimizer",
    "zero1": "DeepSpeedZeroOptimizer",
    "zero2": "DeepSpeedZeroOptimizer",
    "zero3": "DeepSpeedZeroOptimizer_Stage3",
}


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, strategy) for strategy in ENGINES]
    + [
        grid(1, "zero0"),
        (1, "zero3"),
        grid(4, "zero2"),
        grid(4, "zero3"),
        grid(1, "ddp"),
        grid(1, "zero2"),
        grid(4, "zero1"),
    ],
)
def test_bytes_equal_the_allocations(request, trained, tmp_path, world_size, strategy):
    if world_size == 2:
        result = trained(strategy).result
    else:
        group = request.getfixturevalue({1: "one", 4: "four"}[world_size])
        result = group.run(cases.train, argv=arguments(write_recipe(tmp_path), strategy, tmp_path / "out"))[0]
    metrics = result["metrics"]
    if strategy != "ddp":
        assert (result["optimizer"], result["stage"]) == (ENGINES[strategy], int(strategy[-1]))
    elif world_size > 1:
        assert result["engine"] == ENGINES[strategy]
    assert metrics["world_size"] == result["world_size"] == world_size
    for rank, measured in enumerate(metrics["model_state_bytes"]):
        stage = None if strategy == "ddp" else int(strategy[-1])
        expected = model_state_terms(result["groups"], world_size, rank, stage, BUCKET)
        assert {part: measured[part] for part in STATE_PARTS} == expected
        assert measured["offloaded_host"] == measured["offloaded_disk"] == 0


MODES = {
    "bf16_states": (BF16_STATES, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, {}, ()),
    "autocast": (AUTOCAST, {}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, ("--bf16", "false")),
}
# what each trains as: the strategy, the gap of the first loss, before any update, and of all. fp32 weights that compute
# in bf16 are closer to DDP's than bf16 weights are
ALIKE = {"bf16_states": ("zero2", 0, 2e-2), "autocast": ("ddp", 2e-6, 3e-4)}


def with_mode(stage: int, bf16: dict, more: dict) -> str:
    """The shipped ds_config of a stage with small buckets and what a mode adds, as the command line takes it."""
    config = json.loads(Path(f"ds_configs/zero{stage}.json").read_text()) | more
    config["zero_optimization"]["reduce_bucket_size"] = SMALL
    return json.dumps(config | {"bf16": config["bf16"] | bf16})


@pytest.mark.parametrize(
    ("world_size", "mode", "stage"),
    [
        *((2, "bf16_states", 3), grid(2, "autocast", 1), (2, "autocast", 3)),
        *(
            grid(2, "bf16_states", 2),
            grid(2, "autocast", 0),
            grid(2, "bf16_states", 1),
            grid(1, "bf16_states", 2),
            grid(1, "autocast", 3),
            grid(2, "autocast", 2),
        ),
    ],
)
def test_other_precisions(request, trained, tmp_path, world_size, mode, stage):
    """bf16 states: 10 bytes a parameter, all told; autocast: fp32 weights with fp32 masters beside them."""
    widths, bf16, more, options = MODES[mode]
    strategy, first, gap = ALIKE[mode]
    alike = trained(strategy)
    group = request.getfixturevalue({1: "one", 2: "two"}[world_size])
    argv = [str(alike.recipe), "--output_dir", str(tmp_path), "--deepspeed", with_mode(stage, bf16, more), *options]
    argv += ["--eval_strategy", "no", "--save_strategy", "no", "--save_model", "false", "--sample_prompts", "null"]
    result = group.run(cases.train, argv=argv)[0]
    metrics = result["metrics"]
    assert (metrics["strategy"], metrics["precision"]) == (f"zero{stage}_{mode}", "bf16")
    for rank, measured in enumerate(metrics["model_state_bytes"]):
        expected = model_state_terms(result["groups"], world_size, rank, stage, SMALL, widths)
        assert {part: measured[part] for part in STATE_PARTS} == expected
    if world_size == 2:
        found, wanted = (each["loss_history"] for each in (metrics, alike.metrics))
        assert found[0] == pytest.approx(wanted[0], rel=first)
        assert found == pytest.approx(wanted, rel=gap)


def test_offloaded_states_count_as_host(trained):
    plain, offloaded = (trained(name).metrics["model_state_bytes"][0] for name in ("zero2", "zero2_offload"))
    assert offloaded["params"] == plain["params"] and offloaded["optimizer"] == 0
    assert offloaded["offloaded_host"] >= plain["optimizer"] - 16  # DeepSpeedCPUAdam counts steps as integers
