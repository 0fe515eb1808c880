"""A run that is refused leaves its output folder as it was, whatever refuses it and however late."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers.tiny import write_recipe
from zero_recipes.checkpoint import lock


@pytest.fixture(scope="module")
def earlier(one, tmp_path_factory) -> Path:
    """The recipe of a finished run, whose model and checkpoint lie in `out` beside it."""
    folder = tmp_path_factory.mktemp("earlier")
    path = write_recipe(folder, save_model=True, save_strategy="steps", save_steps=2, max_steps=2, sample_prompts=1)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eval_strategy": "steps"}))
    one.run("train", argv=[str(path), "--output_dir", str(folder / "out")])
    return path


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


WITHOUT_WEIGHTS = ["--random_weights", "false"]
REFUSED = {
    "the recipe": ["--lerning_rate", "1e-4"],
    "the strategy": ["--deepspeed", "ds_configs/zero9.json"],
    "the data": ["--dataset_name", "./no/rows"],
    "the rows": ["--max_length", "2"],
    "the weights": WITHOUT_WEIGHTS,
    "the model that would be deleted": ["--model_name_or_path", "OUT", *WITHOUT_WEIGHTS],
    "the model in a checkpoint that would be deleted": ["--model_name_or_path", "OUT/checkpoint-2"],
    "the model by a link": ["--model_name_or_path", "LINK"],
    "the prompts that would be deleted": ["--sample_prompts", "OUT/samples.jsonl"],
    "the model that would be mixed with another": ["--overwrite", "false", "--model_name_or_path", "OUT"],
    "another checkpoint": ["--overwrite", "false", "--resume_from_checkpoint", "./no/checkpoint-1"],
}


@pytest.mark.parametrize("argv", REFUSED.values(), ids=REFUSED)
def test_a_refused_run_leaves_the_folder_as_it_was(one, earlier, argv):
    out = earlier.parent / "out"
    before = contents(out)
    assert {"metrics.json", "model.safetensors"} <= set(before) and any("checkpoint-2/" in name for name in before)
    link = earlier.parent / "link"
    if not link.is_symlink():
        link.symlink_to(out / "checkpoint-2")
    argv = [word.replace("OUT", str(out)).replace("LINK", str(link)) for word in argv]
    given = [str(earlier), "--output_dir", str(out), "--overwrite", "true", *argv]
    assert one.run("refusal_of", argv=given)[0] != "not refused"
    assert contents(out) == before


def test_the_last_refusal_is_that_of_the_loaded_model(one, two, earlier):
    """Attention that the architecture does not have shows once the model is built; nothing is lost on either rank."""
    out = earlier.parent / "out"
    before = contents(out)
    given = [str(earlier), "--output_dir", str(out), "--overwrite", "true", "--attn_implementation", "eager"]
    for group in (one, two):
        said = group.run("refusal_of_a_built_model", argv=given)
        assert all("attn_implementation: eager was requested" in text and "[ZR406]" in text for text in said)
        assert contents(out) == before


def test_a_run_that_fails_before_its_first_step_leaves_what_it_would_have_overwritten(one, two, earlier):
    out = earlier.parent / "out"
    before = contents(out)
    given = [str(earlier), "--output_dir", str(out), "--overwrite", "true"]
    for group in (one, two):
        aside = group.run("output_dir_cases.failure_in_the_first_step", argv=given)
        assert all(names == ["overwritten-1"] for names in aside), "it was not moved aside before that step"
        after = contents(out)
        failures = [f"failure.rank{rank}.json" for rank in range(group.world_size)]
        assert all(after.pop(name) for name in failures)
        assert {name: after.get(name) for name in before} == before and set(after) - set(before) <= {lock.LOCK}


def test_what_is_overwritten_is_gone_after_the_first_step(one, earlier, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(earlier.parent / "out", out)
    for foreign in ("checkpoint-notes/a.txt", "vectors.safetensors"):
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("mine")
    given = [str(earlier), "--output_dir", str(out), "--overwrite", "true", "--seed", "7", "--save_steps", "1"]
    seen = one.run("output_dir_cases.train_and_look", argv=given, folder=str(out))[0]
    assert [[name for name in names if name != "README.md"] for names in seen] == [  # TRL's card may be anybody's
        ["checkpoint-notes", "metrics.json", "overwritten-1", "recipe.resolved.yaml", "vectors.safetensors"],
        ["checkpoint-1", "checkpoint-notes", "metrics.json", "recipe.resolved.yaml", "vectors.safetensors"],
    ]
    after, before = contents(out), contents(earlier.parent / "out")
    assert after["model.safetensors"] != before["model.safetensors"] and not list(out.glob("overwritten-*"))
    assert (out / "checkpoint-notes" / "a.txt").read_text() == (out / "vectors.safetensors").read_text() == "mine"
    assert not (out / lock.LOCK).exists()


def test_all_ranks_of_a_run_hold_and_all_are_refused(two, tmp_path):
    out = tmp_path / "out"
    assert two.run("output_dir_cases.held_by", folder=str(out)) == [2, 2]
    assert not out.exists(), "a run that is refused leaves nothing"
    with lock.hold_output_dir(out):
        said = two.run("output_dir_cases.refused", folder=str(out))
    assert all("ZR747" in text and f"process {os.getpid()} on" in text for text in said)
