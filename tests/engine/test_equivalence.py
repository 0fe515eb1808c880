"""ddp, FSDP2 and every ZeRO stage give what a plain PyTorch loop in fp32 gives: the same losses and the same weights.

The reference takes the token-weighted mean over the global batch in one forward pass. Rows are of very uneven length,
the loss is on the completion alone, gradients are clipped at 1.0. The whole grid: pytest tests/engine -m grid
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.seeded import SEED, count, write_result
from tests.helpers.tiny import arguments, write_recipe, write_rows

NAMES = {1: "one", 2: "two", 4: "four"}
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2")
WORLDS = ACCUMULATIONS = (1, 2, 4)
PLACES = [  # FSDP2 has nobody to share with in a world of one
    place for place in itertools.product(STRATEGIES, WORLDS, ACCUMULATIONS) if place[:2] != ("fsdp2", 1)
]
EXAMPLES = 16  # per optimizer step
ROWS = 165  # an epoch ends with a step of 5 examples, in the middle of the run
STEPS = 20
PART_STEPS = 13  # over that end
TOLERANCE = 1e-5
# (strategy, world size, accumulation): each strategy but one and each accumulation in every run, four processes in the
# grid; tests/engine/test_reshard.py and test_ulysses.py compare losses on four in every run
PART = [*((strategy, 2, 2) for strategy in STRATEGIES if strategy != "zero3_offload"), ("zero2", 1, 4)]
# Keys' biases have no gradient where no rotary embedding turns the keys: they add the same to a query's score of every
# key, and softmax does not see it. What is left is rounding, which Adam scales up to a step.
WITHOUT_GRADIENT = {f"gpt_neox.layers.{layer}.attention.query_key_value.bias" for layer in range(2)}


@dataclass(frozen=True)
class Subject:
    """What every run of the grid is compared with."""

    recipe: Path
    weights: dict[str, torch.Tensor]
    losses: list[float]


def write_subject(folder: Path, steps: int = STEPS) -> Path:
    """A recipe in fp32 with uneven rows, completion-only loss, clipping, weight decay and a model with weights."""
    recipe = write_recipe(
        folder,
        dataset_name=str(write_rows(folder / "uneven", count=ROWS, seed=SEED)),
        random_weights=False,
        bf16=False,
        max_steps=steps,
        global_batch_size=EXAMPLES,
        learning_rate=1.0e-3,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        max_grad_norm=1.0,
        data_seed=7 + SEED,
        save_model=True,
    )
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    return recipe


def reference_of(one, folder: Path, steps: int) -> Subject:
    """Run the reference; `one` is a group of one process."""
    recipe, kept = write_subject(folder, steps), folder / "reference"
    argv = [str(recipe), "--output_dir", str(folder / "nothing")]
    found = one.run("equivalence_cases.train_plainly", argv=argv, folder=str(kept))[0]
    return Subject(recipe, load_file(kept / "model.safetensors"), **found)


def run(group, subject: Subject, folder: Path, strategy: str, accumulation: int) -> dict:
    """One run: what it was asserted to be, and its distance from the reference."""
    world, micro = group.world_size, EXAMPLES // (group.world_size * accumulation)
    argv = arguments(subject.recipe, strategy, folder, "--per_device_train_batch_size", str(micro))
    result = group.run("train", argv=argv)[0]
    metrics = result["metrics"]
    stage = int(strategy[4]) if strategy.startswith("zero") else None
    engine = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPGPTNeoXForCausalLM"}.get(strategy, "DeepSpeedEngine")
    asked = {"engine": engine, "stage": stage, "world_size": world, "accumulation": accumulation, "micro_batch": micro}
    really = {key: result[key] for key in ("engine", "stage", "world_size")}
    really |= {"accumulation": metrics["gradient_accumulation_steps"], "micro_batch": metrics["micro_batch_size"]}
    assert really == asked
    assert metrics["precision"] == "fp32" and metrics["zero_stage"] == stage
    offloaded = sum(states["offloaded_host"] for states in metrics["model_state_bytes"])
    assert (offloaded > 0) == strategy.endswith("_offload")
    return {"strategy": strategy} | really | distance(subject, metrics["loss_history"], folder)


def distance(subject: Subject, losses: list[float], folder: Path) -> dict:
    """Largest relative difference of a loss, relative difference of all weights, and that of tensors further apart."""
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == subject.weights.keys()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    apart = {name: float((weights[name].double() - wanted).norm()) for name, wanted in subject.weights.items()}
    sizes = {name: float(wanted.double().norm()) for name, wanted in subject.weights.items()}
    return {
        "first_loss_delta": abs(losses[0] - subject.losses[0]) / subject.losses[0],
        "loss_delta": max(abs(a - b) / b for a, b in zip(losses, subject.losses, strict=True)),
        "weight_delta": math.hypot(*apart.values()) / math.hypot(*sizes.values()),
        "tensors_further_apart": {
            name: apart[name] / sizes[name] for name in apart if apart[name] > TOLERANCE * sizes[name]
        },
    }


@pytest.fixture(scope="module")
def subject(one, tmp_path_factory):
    return reference_of(one, tmp_path_factory.mktemp("subject"), PART_STEPS)


def assert_equal(found: dict) -> None:
    assert found["first_loss_delta"] <= TOLERANCE, found
    assert found["loss_delta"] <= TOLERANCE, found
    assert found["weight_delta"] <= TOLERANCE, found
    assert set(found["tensors_further_apart"]) <= WITHOUT_GRADIENT, found
    assert all(apart < 1e-3 for apart in found["tensors_further_apart"].values()), found


@pytest.mark.parametrize("strategy, world, accumulation", PART)
def test_a_part_of_the_grid(request, subject, tmp_path, strategy, world, accumulation):
    group = request.getfixturevalue(NAMES[world])
    assert_equal(run(group, subject, tmp_path / "out", strategy, accumulation))


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_the_whole_grid(request, one, tmp_path):
    """Writes benchmarks/results/equivalence.json, then asserts."""
    subject = reference_of(one, tmp_path / "subject", STEPS)
    runs = [
        run(request.getfixturevalue(NAMES[world]), subject, tmp_path / f"{strategy}-{world}-{steps}", strategy, steps)
        for strategy, world, steps in sorted(PLACES, key=lambda place: place[1])
    ]
    deltas = {
        column: {
            strategy: max(found[f"{column}_delta"] for found in runs if found["strategy"] == strategy)
            for strategy in STRATEGIES
        }
        for column in ("loss", "weight")
    }
    document = {
        "what": "distance from a plain PyTorch loop in fp32 with the token-weighted mean over the global batch",
        "examples_per_step": EXAMPLES,
        "steps": STEPS,
        "tolerance": TOLERANCE,
        "tensors_without_gradient": sorted(WITHOUT_GRADIENT),
        "deltas": deltas,
        "runs": runs,
    }
    write_result("equivalence.json", document)
    assert len(runs) == len(PLACES)
    for found in runs:
        assert_equal(found)
    largest = {column: max(by_strategy.values()) for column, by_strategy in deltas.items()}
    count("loss equality", "every strategy", number=len(runs), **largest)
