"""ddp, FSDP2 and every ZeRO stage give what a plain PyTorch loop in fp32 gives: the same losses and the same weights.

The reference takes the token-weighted mean over the global batch in one forward pass. Rows are of very uneven length,
the loss is on the completion alone, gradients are clipped at 1.0. The whole grid: pytest tests/engine -m grid
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from tests.helpers import cases, equivalence_cases
from tests.helpers.seeded import SEED, count, grid, write_result
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
PART_ROWS = 85  # the same
PART_STEPS = 8
TOLERANCE = 1e-5
# (strategy, world size, accumulation): each stage but 0 in every run; offload and four processes in the grid
PART = [("ddp", 2, 2), grid("zero1", 2, 2), ("zero3", 2, 2), ("fsdp2", 2, 2), ("zero2", 1, 4)]
# Keys' biases have no gradient where no rotary embedding turns the keys: they add the same to a query's score of every
# key, and softmax does not see it. What is left is rounding, which Adam scales up to a step.
WITHOUT_GRADIENT = {f"gpt_neox.layers.{layer}.attention.query_key_value.bias" for layer in range(2)}


@dataclass(frozen=True)
class Subject:
    """What every run of the grid is compared with."""

    recipe: Path
    weights: dict[str, torch.Tensor]
    losses: list[float]


def write_subject(folder: Path, steps: int = STEPS, rows: int = ROWS) -> Path:
    """A recipe in fp32 with uneven rows, completion-only loss, clipping, weight decay and a model with weights."""
    recipe = write_recipe(
        folder,
        dataset_name=str(write_rows(folder / "uneven", count=rows, seed=SEED)),
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


def reference_of(one, folder: Path, steps: int, rows: int = ROWS) -> Subject:
    """Run the reference; `one` is a group of one process."""
    recipe, kept = write_subject(folder, steps, rows), folder / "reference"
    argv = [str(recipe), "--output_dir", str(folder / "nothing")]
    found = one.run(equivalence_cases.train_plainly, argv=argv, folder=str(kept))[0]
    return Subject(recipe, load_file(kept / "model.safetensors"), **found)


def run(group, subject: Subject, folder: Path, strategy: str, accumulation: int) -> dict:
    """One run: what it was asserted to be, and its distance from the reference."""
    world, micro = group.world_size, EXAMPLES // (group.world_size * accumulation)
    argv = arguments(subject.recipe, strategy, folder, "--per_device_train_batch_size", str(micro))
    result = group.run(cases.train, argv=argv)[0]
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
    return reference_of(one, tmp_path_factory.mktemp("subject"), PART_STEPS, PART_ROWS)


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


# where transformers and TRL weigh ranks or micro batches: every token weighs the same


def test_the_first_token_of_a_row_counts_in_no_evaluation(one, two, tmp_path):
    """Of rows of text it has a label and no loss; every other token weighs the same, whatever its batch and rank."""
    recipe = write_text_recipe(tmp_path, eval_strategy="steps", eval_steps=4, eval_on_start=True)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--per_device_eval_batch_size", "4"]
    wanted = one.run(equivalence_cases.evaluate_plainly, argv=argv)[0]
    found = two.run(cases.train, argv=argv)[0]["metrics"]["eval_history"]
    assert found[0]["loss"] == pytest.approx(wanted, rel=TOLERANCE)


def write_text_recipe(folder: Path, **keys) -> Path:
    """A GPT-2 with weights and rows of text: every token but a row's first has a loss."""
    rows = folder / "text"
    rows.mkdir()
    lines = [json.dumps({"text": "The fish hums. " * (1 + i * i % 17)}) for i in range(80)]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")
    (rows / "test.jsonl").write_text("\n".join(lines[:11]) + "\n")
    recipe = write_recipe(
        folder, dataset_name=str(rows), dataset_format=None, random_weights=False, bf16=False, max_steps=4,
        global_batch_size=16, weight_decay=0.01, max_grad_norm=1.0, data_seed=7, **keys,
    )  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1031, n_positions=256, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return recipe


def losses(group, recipe: Path, out: Path, *more: str, **keywords) -> tuple[list[float], list[float]]:
    """The losses of a run in training and in evaluation."""
    argv = [str(recipe), "--output_dir", str(out / f"train-{group.world_size}"), *more, "--overwrite", "true"]
    found = group.run(cases.train, argv=argv, **keywords)[0]["metrics"]
    return found["loss_history"], [entry["loss"] for entry in found["eval_history"]]


def assert_same_losses(found: tuple[list[float], ...], wanted: tuple[list[float], ...]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.grid
def test_packed_rows_that_are_repeated_have_no_loss(one, two, tmp_path):
    """In a micro batch of 4 packed rows stand in one, and the last ones of an epoch are repetitions."""
    recipe = write_recipe(
        tmp_path, dataset_name=str(write_rows(tmp_path / "few", count=55)), packing=True, max_length=64, bf16=False,
        global_batch_size=8, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=9,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    plain = losses(one, recipe, tmp_path, "--per_device_train_batch_size", "8")
    found = losses(two, recipe, tmp_path)
    assert_same_losses(found, plain)
    repeated = losses(two, recipe, tmp_path, left_out="zero_recipes.training.token_loss.without_loss")
    assert repeated[0] != pytest.approx(plain[0], rel=100 * TOLERANCE)
    assert repeated[1] != pytest.approx(plain[1], rel=TOLERANCE)


@pytest.mark.grid
def test_a_stream_is_its_rows_again_and_again(one, two, tmp_path):
    """21 rows at 8 a step, against the same rows written five times and read in their order, without a stream."""
    rows = write_rows(tmp_path / "few", count=21)
    again = write_rows(tmp_path / "again", count=21)
    (again / "train.jsonl").write_text((rows / "train.jsonl").read_text() * 5)
    keys = {"bf16": False, "max_steps": 9, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 4}
    keys |= {"global_batch_size": 8, "dataset_name": str(rows), "dataset_streaming": True}
    recipe = write_recipe(tmp_path, **keys)
    whole = ["--dataset_name", str(again), "--dataset_streaming", "false", "--train_sampling_strategy", "sequential"]
    plain = losses(one, recipe, tmp_path, *whole)
    for group in (one, two):
        assert_same_losses(losses(group, recipe, tmp_path), plain)
    assert "21 rows" in (tmp_path / "train-2" / "recipe.resolved.yaml").read_text(), "its start is audited"
