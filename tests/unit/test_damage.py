"""Damage anywhere in a checkpoint is found before anything of it is loaded, by name, and never ends in a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.damage import damaged, mutations, small_checkpoint, taken
from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.compatibility import fit_findings, refuse_other_data
from zero_recipes.checkpoint.documents import HISTORY, LATEST, STATE
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.recipe import parse_recipe
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal

SEED, ROUNDS = int(os.environ.get("DAMAGE_SEED", 12)), int(os.environ.get("DAMAGE_ROUNDS", 1))
ZERO2 = Strategy("zero2", 2, DsConfig({"zero_optimization": {"stage": 2}}), "test")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    mapping = {"model_name_or_path": "m", "max_steps": 20, "per_device_train_batch_size": 2}
    path.write_text(json.dumps(mapping))
    return parse_recipe(path, mapping, ["--gradient_accumulation_steps", "4"]).settings


@pytest.fixture
def look(settings):
    """(output_dir, requested) -> the checkpoint that a run would take."""

    def findings(chosen: str) -> list:
        found = list(fit_findings(chosen, settings, ZERO2))
        refuse_other_data(chosen, "d")
        return found

    return lambda output_dir, requested="true": taken(output_dir, requested, findings)


@pytest.mark.parametrize("schema", [0, 1, 2])
def test_a_whole_one_is_taken(tmp_path, settings, look, schema):
    folder = small_checkpoint(tmp_path, 2, settings, schema)
    assert look(tmp_path, str(folder) if schema == 0 else "true") == str(folder)


def test_bytes_of_any_file(tmp_path, settings, look):
    """Each file is damaged in turn and the checkpoint before is taken: no damage goes unseen, not the manifest's."""
    small_checkpoint(tmp_path, 1, settings)
    small_checkpoint(tmp_path, 2, settings)
    whole = tmp_path / "kept"
    small_checkpoint(tmp_path, 3, settings).rename(whole)
    draw, seen = random.Random(SEED), set()
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for name in names * 4 * ROUNDS:
        folder = Path(shutil.copytree(whole, tmp_path / "checkpoint-3"))
        what = damaged(folder, folder / name, draw)
        same = folder.joinpath(name).exists() and name.name == "manifest.json" and _same(folder / name, whole / name)
        try:
            chosen = look(tmp_path)
        except Refusal as refusal:  # without a manifest it is another program's
            assert refusal.codes == ["ZR704"] and what == "manifest.json: deleted", what
        else:
            assert chosen == str(tmp_path / ("checkpoint-3" if same else "checkpoint-2")), what
        shutil.rmtree(folder)
        seen.add(what.split(": ")[1].split()[-1])
    assert len(names) == 10 and len(seen) > 5


def _same(one: Path, other: Path) -> bool:
    """Whether white space alone was changed."""
    try:
        return json.loads(one.read_text()) == json.loads(other.read_text())
    except ValueError:
        return False


@pytest.mark.parametrize("schema", [0, 1, 2])
@pytest.mark.parametrize("name", [manifest.MANIFEST, STATE, HISTORY])
def test_any_value_of_a_small_file(tmp_path, settings, look, name, schema):
    """Of every kind at every place, where checksums would show it and where there are none (an earlier version's
    checkpoint, another program's): refused by name, passed over, or harmless; never another exception."""
    if schema == 0 and name == manifest.MANIFEST:
        pytest.skip("it has none")
    folder = small_checkpoint(tmp_path, 2, settings, schema)
    path = folder / name
    original = json.loads(path.read_text())
    draw, tried, passed = random.Random(SEED), 0, 0
    for what, document in mutations(original, draw, each=min(ROUNDS, 24)):
        path.write_text(json.dumps(document))
        if schema == 1 and name != manifest.MANIFEST:  # its size is the only thing that this manifest knows
            written = json.loads((folder / manifest.MANIFEST).read_text())
            written["files"][name] = path.stat().st_size
            (folder / manifest.MANIFEST).write_text(json.dumps(written))
        tried += 1
        try:
            chosen = look(tmp_path, str(folder) if schema == 0 else "true")
        except Refusal:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        passed += chosen is not None
        assert chosen is None or schema < 2 or document == original, what
    assert tried > 50 and passed < tried


TEXTS = [
    "",
    "null",
    "[]",
    "{",
    "[" * 100_000,
    '"x"',
    "\0",
    "{}" * 2,
    "1" * 5000,
    '{"global_step": NaN, "summary": NaN}',
    "\ufeff{}",
    "\udcff",
]


@pytest.mark.parametrize("name", [manifest.MANIFEST, STATE, HISTORY, LATEST])
@pytest.mark.parametrize("schema", [0, 1])
def test_texts_that_are_no_document(tmp_path, settings, look, name, schema):
    if schema == 0 and name == manifest.MANIFEST:
        pytest.skip("it has none")
    folder = small_checkpoint(tmp_path, 2, settings, schema)
    for text in [*TEXTS, "..", "../checkpoint-1", "/etc", "global_step9", "a\nb", "global_step2/"]:
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        if schema == 1 and name != manifest.MANIFEST:
            written = json.loads((folder / manifest.MANIFEST).read_text())
            written["files"][name] = (folder / name).stat().st_size
            (folder / manifest.MANIFEST).write_text(json.dumps(written))
        with pytest.raises(Refusal) if schema == 0 else _Fresh(look, tmp_path):
            look(tmp_path, str(folder))
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(Refusal) if schema == 0 else _Fresh(look, tmp_path):
        look(tmp_path, str(folder))


class _Fresh:
    """A run that would go on starts fresh, and one that names the checkpoint is refused."""

    def __init__(self, look, output_dir: Path):
        assert look(output_dir) is None
        self.refused = pytest.raises(Refusal)

    def __enter__(self):
        return self.refused.__enter__()

    def __exit__(self, *arguments):
        return self.refused.__exit__(*arguments)


def test_what_is_wrong_is_said_by_name(tmp_path, settings, capsys, look):
    folder = small_checkpoint(tmp_path, 2, settings, schema=1)
    document = json.loads((folder / STATE).read_text())
    written = json.loads((folder / manifest.MANIFEST).read_text())
    for change, said in (
        ({"global_step": -3}, "global_step: Input should be greater than or equal to 0"),
        ({"global_step": 3}, "is of step 3; the manifest says 2"),
        ({"log_history": "none"}, "log_history: Input should be a valid list"),
        ({"nobody": 1}, "transformers does not know nobody"),
    ):
        (folder / STATE).write_text(json.dumps(document | change))
        written["files"][STATE] = (folder / STATE).stat().st_size
        (folder / manifest.MANIFEST).write_text(json.dumps(written))
        assert look(tmp_path) is None
        assert said in (printed := capsys.readouterr().out) and "checkpoint-2" in printed
    folder.rename(tmp_path / "checkpoint-5")
    assert "checkpoint-5 is the checkpoint of step 2" in manifest.damage(tmp_path / "checkpoint-5")


def test_a_file_that_was_added_is_named(tmp_path, settings):
    """transformers reads model.safetensors before the shards of an index; DeepSpeed all files of a pattern."""
    folder = small_checkpoint(tmp_path, 2, settings)
    (folder / "notes.txt").write_text("mine")
    assert manifest.damage(folder) is None
    for name in ("model.safetensors.index.json", "global_step2/mp_rank_01_model_states.pt"):
        (folder / name).write_bytes(b"x")
        assert f"{name} is no file of this checkpoint" in manifest.damage(folder)
        (folder / name).unlink()


def test_checksums_may_be_left_out(tmp_path, settings):
    folder = small_checkpoint(tmp_path, 2, settings)
    facts = {key: value for key, value in manifest.read(folder).items() if key not in ("schema", "files", "checksums")}
    manifest.write(folder, facts, with_checksums=False)
    (folder / "scheduler.pt").write_bytes((folder / "scheduler.pt").read_bytes()[::-1])
    assert manifest.damage(folder) is None and manifest.content_fault(folder) is None
    assert not manifest.has_checksums(folder)


def test_each_rank_looks_at_its_share(tmp_path, settings):
    """Together at all files, and each file is one rank's."""
    folder = small_checkpoint(tmp_path, 2, settings)
    for name in manifest.read(folder)["files"]:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([before[0] ^ 1]) + before[1:])
        for world in (1, 2, 3, 16):
            found = [manifest.content_fault(folder, rank, world) for rank in range(world)]
            assert [fault for fault in found if fault] == [
                f"{folder / name} is not what was written: its checksum is another."
            ]
        (folder / name).write_bytes(before)


@pytest.mark.parametrize("fact", ["strategy", "zero_stage", "world_size", "micro_batch_size"])
def test_a_manifest_that_says_too_little_is_no_key_error(tmp_path, settings, look, fact):
    folder = small_checkpoint(tmp_path, 2, settings)
    facts = {key: value for key, value in manifest.read(folder).items() if key not in ("schema", "files", fact)}
    manifest.write(folder, facts)
    with pytest.raises(Refusal) as caught:
        look(tmp_path)
    assert caught.value.codes == ["ZR781"] and fact in caught.value.what
