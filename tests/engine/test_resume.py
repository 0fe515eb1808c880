"""Going on from a checkpoint is bit-exact: losses, gradient norms, tokens, and every tensor of the last checkpoint."""

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers import cases, checkpoint_cases, ending_cases
from tests.helpers.resuming import EXACT, KINDS, LORA, SAVED_AT, STEPS, Shape, compare, drawn, gaps_of, resume_recipe
from tests.helpers.seeded import count, grid, write_result
from tests.helpers.tiny import arguments, write_rows
from tests.helpers.tools import flip, plant
from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.save import checkpoint_fault, content_fault

GROUPS = {1: "one", 2: "two"}  # fixtures, by world size
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2")
PLUS = {"loraplus_lr_ratio": 16.0}
SAMPLES = ("--sample_prompts", "2", "--sample_max_new_tokens", "3")


@pytest.mark.parametrize(
    ("strategy", "bf16", "keys"),
    [
        grid("ddp", True, LORA | PLUS),
        ("zero2", True, LORA | PLUS),
        ("zero3", False, {}),
        grid("zero2_bf16_states", True, {}),
        grid("zero3_bf16_states", True, {}),
        grid("zero3", True, LORA | PLUS),
        grid("zero3_offload", True, LORA | PLUS),
        grid("fsdp2", False, LORA | PLUS),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(two, tmp_path, strategy, bf16, keys):
    assert compare(two, tmp_path, strategy, bf16=bf16, **keys) == EXACT


@pytest.mark.parametrize(  # every kind: test_shapes_that_nobody_has_chosen
    "shape",
    [
        # inside the second epoch, over its end
        grid(Shape("random", rows=27, micro=2, accumulation=2, killed=6, steps=9)),
        grid(Shape("lengths", rows=27, micro=2, accumulation=2, killed=9, steps=12)),  # in the third epoch
        grid(Shape("rebalance", rows=51, micro=2, accumulation=4, killed=6, steps=9, strategy="zero2")),
        grid(Shape("packed stream", rows=21, micro=2, accumulation=2, killed=7, steps=9, strategy="zero2")),
        Shape("packed and shuffled stream", rows=21, micro=2, accumulation=2, killed=7, steps=9, strategy="zero2"),
        grid(Shape("shuffled stream", rows=21, micro=2, accumulation=2, killed=5, steps=9, strategy="zero3")),
        Shape("mixture", rows=19, micro=2, accumulation=2, killed=7, steps=10, world=1),
    ],
    ids=lambda shape: f"{shape.kind}-world{shape.world}",
)
def test_rows_that_do_not_divide_are_resumed_bit_for_bit(request, tmp_path, shape):
    assert gaps_of(request.getfixturevalue(GROUPS[shape.world]), tmp_path, shape) == EXACT


@pytest.fixture(scope="module")
def zero0(two, tmp_path_factory):
    """(recipe, folder of a whole run of zero0, its losses)."""
    folder = tmp_path_factory.mktemp("zero0")
    recipe = resume_recipe(folder)
    metrics = two.run(cases.train, argv=arguments(recipe, "zero0", folder / "whole", *SAMPLES))[0]["metrics"]
    return recipe, folder / "whole", metrics["loss_history"]


def test_a_finished_run_trains_nothing_and_keeps_its_figures(two, zero0, tmp_path):
    """A pod that restarts after the end. `before` stays what the untrained model said."""
    recipe, whole, losses = zero0
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    argv = arguments(recipe, "zero0", folder, "--resume_from_checkpoint", "true", *SAMPLES)
    again = two.run(cases.train_counted, argv=argv)
    metrics = again[0]["metrics"]
    assert again[0]["calls"] == again[1]["calls"] == [] and metrics["loss_history"] == losses
    assert metrics["status"] == "ok" and metrics["step_seconds"]["median"] > 0 and metrics["resumed_at"] == [STEPS]
    assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_other_rows_are_refused_on_every_rank(two, zero0, tmp_path):
    recipe, whole, _ = zero0
    more = ("--resume_from_checkpoint", "true", "--dataset_name", str(write_rows(tmp_path / "others", 20, seed=1)))
    argv = arguments(recipe, "zero0", Path(shutil.copytree(whole, tmp_path / "copy")), *more)
    for said in two.run(ending_cases.refusal_of, argv=argv):
        assert "was trained on different rows [ZR727]" in said


def test_a_flipped_bit_is_passed_over_and_the_rest_is_bit_for_bit(two, zero0, tmp_path):
    """The last checkpoint's states are damaged: the run goes on from the one before, on both ranks."""
    recipe, whole, losses = zero0
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    last = folder / f"checkpoint-{STEPS}"
    flip(next(last.rglob("mp_rank_00_model_states.pt")), random.Random(3))
    argv = arguments(recipe, "zero0", folder, "--resume_from_checkpoint", "true", *SAMPLES)
    rest = two.run(cases.train_counted, argv=argv)
    metrics = rest[0]["metrics"]
    assert metrics["loss_history"] == losses and metrics["resumed_at"] == [SAVED_AT]
    assert min(rest[0]["calls"]) == min(rest[1]["calls"]) == SAVED_AT
    assert checkpoint_fault(last) is None and content_fault(last) is None
    aside = folder / f"damaged-checkpoint-{STEPS}"
    assert content_fault(aside).endswith("its checksum differs.")


def test_a_stranger_s_code_in_the_own_folder_is_refused_on_every_rank(two, zero0, tmp_path):
    """A downloaded folder that says it was killed is resumed without a word in the recipe; its manifest fits."""
    recipe, whole, _ = zero0
    folder, mark = Path(shutil.copytree(whole, tmp_path / "copy")), tmp_path / "it-was-run"
    last, metrics = folder / f"checkpoint-{STEPS}", folder / "metrics.json"
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"status": "running"}))
    states = next(last.rglob("mp_rank_00_model_states.pt"))
    plant(last / "training_args.bin", mark, "zip 2")  # nothing loads it
    plant(states, mark, "zip 2")
    save.write_manifest(last, save.read_manifest(last))
    argv = arguments(recipe, "zero0", folder, *SAMPLES)
    for said in two.run(ending_cases.refusal_of, argv=argv):
        assert f"checkpoint-{STEPS} holds {states.relative_to(last)}" in said and said.endswith("[ZR780]")
    shutil.copy(whole / states.relative_to(folder), states)
    save.write_manifest(last, save.read_manifest(last))
    assert two.run(cases.train_counted, argv=argv)[0]["metrics"]["resumed_at"] == [STEPS] and not mark.exists()


def test_a_program_of_ones_own_runs_no_stranger_s_code(two, tmp_path):
    """DeepSpeed does, without the check: it loads its files with weights_only=False."""
    folder, mark = tmp_path / "out", tmp_path / "it-was-run"
    assert two.run(checkpoint_cases.train_as_library, folder=str(folder), steps=1) == [1, 1]
    last = folder / "checkpoint-1"
    states = next(last.rglob("zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    plant(states, mark, "zip 2")
    save.write_manifest(last, save.read_manifest(last))
    resumed = {"folder": str(folder), "steps": 2, "resume": str(last)}
    assert two.run(checkpoint_cases.train_as_library, **resumed) == [["ZR780"], ["ZR780"]] and not mark.exists()
    assert two.run(checkpoint_cases.train_as_library, **resumed, refuses_code=False) == [2, 2] and mark.exists()


def test_a_checkpoint_of_plain_transformers_is_taken_by_its_path(two, zero0, tmp_path):
    recipe, whole, losses = zero0
    folder = Path(shutil.copytree(whole / f"checkpoint-{SAVED_AT}", tmp_path / f"checkpoint-{SAVED_AT}"))
    for name in ("manifest.json", "history.json"):
        (folder / name).unlink()
    argv = arguments(recipe, "zero0", tmp_path / "rest", "--resume_from_checkpoint", str(folder))
    metrics = two.run(cases.train, argv=argv)[0]["metrics"]
    assert metrics["loss_history"] == losses[SAVED_AT:] and metrics["first_step"] == SAVED_AT + 1


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_the_whole_grid(two, tmp_path):
    """Every strategy, full and LoRA, bf16 and fp32; writes benchmarks/results/resume.json."""
    found = {}
    for strategy, name, precision in itertools.product(STRATEGIES, ("full", "lora"), ("bf16", "fp32")):
        folder = tmp_path / f"{strategy}-{name}-{precision}"
        folder.mkdir()
        gaps = compare(two, folder, strategy, bf16=precision == "bf16", **(LORA if name == "lora" else {}))
        found.setdefault(strategy, {}).setdefault(name, {})[precision] = gaps
        assert gaps == EXACT, folder.name
    document = {
        "what": "largest absolute difference between a run interrupted and resumed and the uninterrupted one: of "
        "losses, gradient norms, evaluation, and of all tensors of the last checkpoint (weights; states: those of "
        "optimizer, schedule and random numbers of each rank)",
        "world_size": 2,
        "saved_at": SAVED_AT,
        "steps": STEPS,
        "strategies": found,
    }
    write_result("resume.json", document)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [1, 2])
def test_shapes_that_nobody_has_chosen(request, tmp_path, world):
    """Of every kind of KINDS and every accumulation, drawn by seed."""
    strategies = ("ddp",) if world == 1 else ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    kinds = [kind for kind in list(KINDS) * 2 if (kind, world) != ("split_batches", 1)]
    largest = 0.0
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        shape = drawn(number, world, strategies, (kind,))
        gaps = gaps_of(request.getfixturevalue(GROUPS[world]), folder, shape)
        assert gaps == EXACT, shape
        largest = max(largest, *gaps.values())
        shutil.rmtree(folder)
    count("resume", f"world {world}", number=len(kinds), largest=largest)
