"""The optimizer that was built, held against the one that was asked for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn
from transformers import TrainingArguments, get_scheduler

from zero_recipes.engine import optimizers
from zero_recipes.engine.optimizers import OptimizerFacts, are_equal, optimizer_facts
from zero_recipes.training import as_asked
from zero_recipes.training.as_asked import NotAsAsked, OptimizerProof, block_differences, optimizer_differences

ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
ASKED = OptimizerFacts("torch.AdamW", True, {"matrix": ADAMW, "bias": ADAMW | {"weight_decay": 0.0}})
TRAINED = {"matrix", "bias"}


def differences(**changes) -> list[str]:
    return optimizer_differences(ASKED, replace(ASKED, **changes), TRAINED)


def test_the_same_optimizer_by_another_program_is_no_difference():
    assert differences() == []
    assert differences(kind="deepspeed.DeepSpeedCPUAdam") == []
    assert differences(settings={name: {} for name in TRAINED}) == [], "keys that it lacks are not compared"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"kind": "deepspeed.DeepSpeedCPULion"}, "optimizer: torch.AdamW asked for, deepspeed.DeepSpeedCPULion built"),
        ({"is_decoupled": False}, "weight decay: decoupled, as in AdamW, asked for; added to the gradient"),
        ({"settings": ASKED.settings | {"bias": ADAMW}}, "weight_decay of bias: 0.0 asked for, 0.1 built"),
        ({"settings": ASKED.settings | {"matrix": ADAMW | {"eps": 1e-6}}}, "eps of matrix: 1e-08 asked for, 1e-06"),
        ({"settings": ASKED.settings | {"matrix": ADAMW | {"betas": [0.9, 0.99]}}}, "betas of matrix"),
        ({"settings": ASKED.settings | {"matrix": ADAMW | {"lr": 2e-3}}}, "lr of matrix: 0.001 asked for, 0.002 built"),
        ({"settings": {"matrix": ADAMW}}, "in no group of the optimizer: bias"),
        ({"repeated": ("bias",)}, "in two groups of the optimizer: bias"),
    ],
)
def test_every_difference_is_said_with_both_values(changes, said):
    (found,) = differences(**changes)
    assert found.startswith(said), found


def test_frozen_parameters_are_in_no_group():
    alone = replace(ASKED, settings={"matrix": ADAMW})
    assert optimizer_differences(alone, alone, {"matrix"}) == []
    assert optimizer_differences(alone, alone, TRAINED) == ["in no group of the optimizer: bias"]


@pytest.mark.parametrize(
    "block, kind, decouples, right",
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, "deepspeed.FusedAdam", True, True),
        ({"type": "Adam", "params": {"lr": 1e-3}}, "torch.AdamW", True, True),  # DeepSpeed's default is AdamW's update
        ({"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}, "torch.Adam", False, True),
        ({"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}}, "torch.AdamW", True, False),
        ({"type": "SGD", "params": {"lr": 1e-3}}, "torch.SGD", None, True),
        ({"type": "SGD", "params": {"lr": 1e-3}}, "deepspeed.DeepSpeedCPUAdam", True, False),
        ({"type": "AdamW", "params": {"lr": 2e-3}}, "deepspeed.FusedAdam", True, False),
    ],
)
def test_an_optimizer_block_is_what_it_says(block, kind, decouples, right):
    built = OptimizerFacts(kind, decouples, dict.fromkeys(TRAINED, ADAMW))
    assert (block_differences(block, built, TRAINED) == []) == right


def test_facts_of_torchs_and_deepspeeds_optimizers():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    model[1].weight.requires_grad = False
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "weight_decay": 0.0}]
    facts = optimizer_facts(SimpleNamespace(optimizer=torch.optim.AdamW(groups, lr=0.5)), model)
    assert (facts.kind, facts.is_decoupled, facts.repeated) == ("torch.AdamW", True, ())
    assert {name: (one["lr"], one["weight_decay"]) for name, one in facts.settings.items()} == {
        "0.weight": (0.5, 0.1),
        "0.bias": (0.5, 0.0),
    }
    assert optimizers.trained_names(model) == {"0.weight", "0.bias"}
    assert optimizer_facts(torch.optim.Adam(model.parameters()), model).is_decoupled is False
    assert optimizer_facts(torch.optim.SGD(model.parameters(), lr=0.1), model).is_decoupled is None
    fused = FusedAdam.__new__(FusedAdam)
    fused.adam_w_mode = 1
    assert optimizers.is_decoupled(fused) is True


def test_numbers_are_equal_up_to_rounding():
    assert are_equal(1e-3, 1e-3 * (1 + 1e-8)) and are_equal([0.9, 0.999], [0.9, 0.999])
    assert not are_equal(1e-3, 1.01e-3) and not are_equal([0.9], [0.9, 0.999]) and not are_equal(0.0, 1e-9)


# learning rates


def proof_of(model: nn.Module, rates: tuple[float, float], schedule: str, steps: int) -> tuple:
    """(a proof that has begun, the optimizer, its schedule)."""
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
    optimizer = torch.optim.SGD(groups, lr=rates[0])
    proof = OptimizerProof()
    proof.ask(optimizer, model)
    lr_schedule = get_scheduler(schedule, optimizer, 1, steps)
    args = TrainingArguments("unused", use_cpu=True, learning_rate=rates[0], warmup_steps=1, lr_scheduler_type=schedule)
    proof.hold(optimizer, model, None, lr_schedule, args, steps)
    return proof, optimizer, lr_schedule


def take_steps(proof: OptimizerProof, model, optimizer, schedule, each: int = 1) -> None:
    for step in range(1, as_asked.WATCHED_STEPS + 1):
        optimizer.step()
        for _ in range(each):
            schedule.step()
        proof.hold_rates(optimizer, model, step, was_skipped=False)
        proof.hold_rates(optimizer, model, step, was_skipped=False)  # at an epoch's end once more


def test_the_first_learning_rates_are_those_of_the_schedule():
    model = nn.Linear(2, 2)
    proof, optimizer, schedule = proof_of(model, (1e-3, 16e-3), "cosine", 10)
    take_steps(proof, model, optimizer, schedule)


def test_a_schedule_that_goes_twice_as_fast_ends_the_run():
    model = nn.Linear(2, 2)
    proof, optimizer, schedule = proof_of(model, (1e-3, 16e-3), "cosine", 10)
    with pytest.raises(NotAsAsked, match=r"after step 1: 0\.001 asked for, 0\.000969"):
        take_steps(proof, model, optimizer, schedule, each=2)


@pytest.mark.parametrize("spoiled_at", [1, 2, 3, 4])
def test_a_rate_that_a_library_changes_in_the_first_steps_ends_the_run(spoiled_at):
    """In the first three. All steps are not looked at: each look costs some time."""
    model = nn.Linear(2, 2)
    proof, optimizer, schedule = proof_of(model, (1e-3, 16e-3), "cosine", 10)
    said = None
    for step in range(1, 5):
        optimizer.step()
        schedule.step()
        if step == spoiled_at:
            optimizer.param_groups[0]["lr"] *= 1.5
        try:
            proof.hold_rates(optimizer, model, step, was_skipped=False)
        except NotAsAsked as error:
            said = str(error)
            break
    assert said is None if spoiled_at == 4 else f"learning rate of weight after step {spoiled_at}:" in said


def test_a_step_without_effect_moves_no_schedule():
    model = nn.Linear(2, 2)
    proof, optimizer, schedule = proof_of(model, (1e-3, 1e-3), "linear", 10)
    proof.hold_rates(optimizer, model, 1, was_skipped=True)
    take_steps(proof, model, optimizer, schedule)


@pytest.mark.parametrize("after, is_right", [((5e-4, 8e-3), True), ((5e-4, 5e-4), False), ((0.0, 0.0), True)])
def test_a_schedule_of_deepspeeds_keeps_the_ratio_of_rates(after, is_right):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 16e-3}]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    proof = OptimizerProof()
    proof.ask(optimizer, model)
    schedule = SimpleNamespace()
    proof.hold(optimizer, model, None, schedule, None, 10)
    for group, rate in zip(optimizer.param_groups, after, strict=True):
        group["lr"] = rate
    if is_right:
        proof.hold_rates(optimizer, model, 1, was_skipped=False)
    else:
        with pytest.raises(NotAsAsked, match=r"learning rate of weight: 3\.125e-05 asked for beside 0\.0005"):
            proof.hold_rates(optimizer, model, 1, was_skipped=False)
