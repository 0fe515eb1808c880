"""Damage anywhere in a checkpoint is found before anything of it is loaded, and the one before it is taken."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.damage import DAMAGES, lose, refusal_of, small_checkpoint, taken
from zero_recipes.checkpoint.save import (
    HISTORY,
    LATEST,
    MANIFEST,
    STATE,
    checkpoint_fault,
    content_fault,
    manifest_facts,
    read_manifest,
    write_manifest,
)
from zero_recipes.config.recipe import parse_recipe

SEED, ROUNDS = int(os.environ.get("DAMAGE_SEED", 12)), int(os.environ.get("DAMAGE_ROUNDS", 1))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    mapping = {"model_name_or_path": "m", "max_steps": 20, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(mapping))
    return parse_recipe(path, mapping, ["--gradient_accumulation_steps", "4"]).settings


def test_bytes_of_any_file(tmp_path, settings):
    """Each file is damaged in each way, the manifest too, and the checkpoint before is taken."""
    for step in (1, 2):
        small_checkpoint(tmp_path, step, settings)
    whole = small_checkpoint(tmp_path, 3, settings).rename(tmp_path / "kept")
    draw, names = random.Random(SEED), [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for name in names * ROUNDS:
        for damage in DAMAGES:
            folder = Path(shutil.copytree(whole, tmp_path / "checkpoint-3"))
            assert taken(tmp_path) == str(folder)
            damage(folder / name, draw)
            if damage is lose and name.name == MANIFEST:  # then it is another program's
                assert refusal_of(taken, tmp_path).codes == ["ZR704"]
            else:
                same = name.name == MANIFEST and read_manifest(folder) == read_manifest(whole)  # white space
                wanted = "checkpoint-3" if same else "checkpoint-2"
                assert taken(tmp_path) == str(tmp_path / wanted), f"{damage.__name__} of {name}"
            shutil.rmtree(folder)
    assert len(names) == 10


@pytest.mark.parametrize("name", [STATE, HISTORY, LATEST])
def test_small_files_without_checksums_that_no_resume_could_read(tmp_path, settings, name):
    """Another program's checkpoint, and one of a run with skip_checksums."""
    foreign, unchecked = (small_checkpoint(tmp_path / folder, 2, settings) for folder in ("foreign", "unchecked"))
    (foreign / MANIFEST).unlink()
    assert taken(tmp_path, str(foreign)) == str(foreign)
    for text in ("[" * 100_000, "..", "../checkpoint-1", "/etc", "global_step9", "a\nb", "{", '{"global_step": -3}x'):
        for folder in (foreign, unchecked):
            (folder / name).write_text(text)
        write_manifest(unchecked, manifest_facts(unchecked), with_checksums=False)
        for folder in (foreign, unchecked):
            refusal = refusal_of(taken, tmp_path, str(folder))
            assert refusal.codes == ["ZR707"] and f"{name} of {folder} cannot be read" in refusal.why
    for change in ({"global_step": -3}, {"nobody": 1}, {"log_history": "none", "global_step": "x"}):
        (foreign / STATE).write_text(json.dumps(change))
        assert refusal_of(taken, tmp_path, str(foreign)).codes == ["ZR707"]


def test_what_is_wrong_is_named(tmp_path, settings):
    """transformers reads model.safetensors before the shards of an index; DeepSpeed all files of a pattern."""
    folder = small_checkpoint(tmp_path, 2, settings)
    (folder / "notes.txt").write_text("mine")
    assert checkpoint_fault(folder) is None
    for name in ("model.safetensors.index.json", "global_step2/mp_rank_01_model_states.pt"):
        (folder / name).write_bytes(b"x")
        assert f"{name} is no file of this checkpoint" in checkpoint_fault(folder)
        (folder / name).unlink()
    facts = json.loads((folder / MANIFEST).read_text()) | {"world_size": 4}
    changed = (json.dumps(facts), "it was changed after it was written")
    for text, said in (changed, ("{", "Expecting"), ('{"schema": 7}', "its schema is 7"), ("[]", "list indices")):
        (folder / MANIFEST).write_text(text)
        assert said in checkpoint_fault(folder) and read_manifest(folder) is None
    folder = small_checkpoint(tmp_path, 3, settings).rename(tmp_path / "checkpoint-5")
    assert "checkpoint-5 is the checkpoint of step 3" in checkpoint_fault(folder)


def test_checksums_may_be_left_out(tmp_path, settings):
    folder = small_checkpoint(tmp_path, 2, settings)
    write_manifest(folder, manifest_facts(folder), with_checksums=False)
    (folder / "scheduler.pt").write_bytes((folder / "scheduler.pt").read_bytes()[::-1])
    assert checkpoint_fault(folder) is None and content_fault(folder) is None
    assert read_manifest(folder)["checksums"] == {}


def test_each_rank_looks_at_its_share(tmp_path, settings):
    """Together at all files, and each file is one rank's."""
    folder = small_checkpoint(tmp_path, 2, settings)
    for name in read_manifest(folder)["files"]:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([before[0] ^ 1]) + before[1:])
        for world in (1, 2, 3, 16):
            faults = [content_fault(folder, rank, world) for rank in range(world)]
            wanted = f"{folder / name} is not what was written: its checksum is another."
            assert [fault for fault in faults if fault] == [wanted]
        (folder / name).write_bytes(before)
