"""One run at a time in an output folder; `--overwrite true` keeps what was there, never takes what the run reads."""

import errno
import fcntl
import json
import shutil
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.tiny import write_recipe
from tests.helpers.tools import contents, refusal_of
from zero_recipes.checkpoint import output_dir as folders
from zero_recipes.checkpoint.save import begin_checkpoint, write_manifest
from zero_recipes.checks.preflight import preflight
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import read_recipe_file
from zero_recipes.core import folder_lock
from zero_recipes.core.files import PART, write_text

FORK = get_context("fork")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.1)
    monkeypatch.delenv("RANK", raising=False)


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(work, *arguments) -> str:
    return str(refusal_of(work, *arguments) or "")


def hold(folder: Path, pipe) -> None:
    with folders.hold_output_dir(folder):
        pipe.send("held")
        pipe.recv()


def test_a_second_start_is_refused_and_touches_nothing(tmp_path):
    out, (ours, theirs) = tmp_path / "out", FORK.Pipe()
    holder = FORK.Process(target=hold, args=(out, theirs), daemon=True)
    holder.start()
    assert ours.recv() == "held"
    for start in (folder_lock.refuse_in_use, lambda out: folders.hold_output_dir(out).__enter__()):
        assert "ZR747" in refused(start, out)
        assert sorted(path.name for path in out.iterdir()) == [folders.LOCK]
    holder.kill()
    holder.join()
    assert refused(folder_lock.refuse_in_use, out) == "", "the lock of a killed run is not stale"
    write(out / "metrics.json", '{"status": "ok"}')
    with folders.hold_output_dir(out):
        assert "ZR747" in refused(folder_lock.refuse_in_use, out)
        folders.claim_output_dir(out, True)  # the lock goes on in the folder that takes the place of the old one
        assert FORK.Pool(1).apply(refused, (folder_lock.refuse_in_use, out)).count("ZR747") == 1
        assert not (tmp_path / "out.previous" / folders.LOCK).exists()
    assert refused(folder_lock.refuse_in_use, out) == "" and list(out.iterdir()) == []


def test_a_folder_that_cannot_be_made_and_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    assert "ZR748" in refused(folders.hold_output_dir(write(tmp_path / "file") / "out").__enter__)
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with folders.hold_output_dir(tmp_path):
        assert "without locks, so other runs in it are not detected" in capsys.readouterr().out


@pytest.fixture
def old_run(tmp_path, monkeypatch) -> Path:
    """A finished run in `out`, in the working directory, and links to it."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    for name in ("model.safetensors", "samples.jsonl", "recipe.resolved.yaml", "mine/notes.txt"):
        write(out / name, "{}")
    write(out / "metrics.json", '{"status": "ok"}')
    begin_checkpoint(out / "checkpoint-4")
    write_manifest(out / "checkpoint-4", {"step": 4})
    write(tmp_path / "other" / "rows.jsonl", "rows")
    (out / "link").symlink_to(tmp_path / "other")  # the link goes, not what it leads to
    (tmp_path / "linked").symlink_to(out / "checkpoint-4")
    return tmp_path


def test_the_folder_is_kept_whole_and_only_once(old_run):
    out, previous = old_run / "out", old_run / "out.previous"
    for number in range(3):
        write(out / "metrics.json", json.dumps({"status": "ok", "number": number}))
        before = contents(out)
        assert folders.claim_output_dir(out, True) == previous and contents(out) == {} and contents(previous) == before
        write(out / "metrics.json", '{"status": "failed"}')
        assert folders.claim_output_dir(out, True) is None, "a run that saved nothing would push out the results"
        assert contents(previous) == before
    assert (old_run / "other" / "rows.jsonl").is_file()
    (out / "failure.rank0.json").touch()
    assert folders.claim_output_dir(out, False) is None and not (out / "failure.rank0.json").exists()


def test_a_link_keeps_its_folder_beside_what_it_leads_to(old_run):
    (old_run / "out").rename(old_run / "real")
    (old_run / "out").symlink_to(old_run / "real")
    assert folders.claim_output_dir(old_run / "out", True) == old_run / "real.previous"
    assert (old_run / "out").is_symlink() and contents(old_run / "out") == {}


@pytest.mark.parametrize("where", ["out", "out.previous"])
def test_what_another_program_wrote_is_neither_renamed_nor_deleted(old_run, where):
    write(old_run / where / "model.safetensors", "downloaded")
    for name in ("metrics.json", "recipe.resolved.yaml", "checkpoint-4/manifest.json"):
        (old_run / where / name).unlink(missing_ok=True)
    before = contents(old_run)
    for work, arguments in ((folders.refuse_occupied, (None, True)), (folders.claim_output_dir, (True,))):
        assert "has no run of zero-recipes" in refused(work, old_run / "out", *arguments)
    assert contents(old_run) == before


# what the run reads

READ = {  # keys -> whether they name what would be taken away
    "the model": ({"model_name_or_path": "out"}, True),
    "the model in a checkpoint": ({"model_name_or_path": "out/checkpoint-4"}, True),
    "the model by a link": ({"model_name_or_path": "linked"}, True),
    "a mixture's files": ({"datasets": [{"path": "json", "data_files": {"train": "./out/*.jsonl"}}]}, True),
    "what would be deleted": ({"model_name_or_path": "out.previous"}, True),
    "rows beside it": ({"dataset_name": "other/rows.jsonl"}, False),
    "a split of that name": ({"dataset_train_split": "out"}, False),
}


@pytest.mark.parametrize(("keys", "is_taken"), READ.values(), ids=READ)
def test_what_a_run_reads_is_never_taken_away(old_run, keys, is_taken):
    shutil.copytree(old_run / "out", old_run / "out.previous")
    mapping = {"dataset_name": "json", "output_dir": "out"} | keys
    settings = parse_recipe(write(old_run / "recipe.yaml", json.dumps(mapping)), dict(mapping), []).settings
    inputs = list(folders.inputs_of(settings, Path("recipe.yaml"), {}))
    message = refused(folders.refuse_occupied, Path("out"), None, True, inputs)
    assert ("ZR75" in message and next(iter(keys)) in message) if is_taken else message == ""
    launcher = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "out/checkpoint-4/manifest.json"}
    for recipe, environment in (("out/recipe.resolved.yaml", {}), ("recipe.yaml", launcher)):
        inputs = folders.inputs_of(settings, Path(recipe), environment)
        assert "ZR75" in refused(folders.refuse_occupied, Path("out"), None, True, inputs)


def test_an_occupied_folder_is_refused_by_what_it_holds(old_run):
    out = old_run / "out"
    assert [path.name for path in folders.saved_in(out)] == ["checkpoint-4", "model.safetensors", "metrics.json"]
    said = refused(folders.refuse_occupied, out, None, False)
    assert "checkpoint-4, model.safetensors, metrics.json [ZR702]" in said and str(old_run / "out.previous") in said
    for resume, overwrite in (("true", False), (str(out / "checkpoint-4"), False), (None, True)):
        assert refused(folders.refuse_occupied, out, resume, overwrite) == ""
    assert "ZR702" in refused(folders.refuse_occupied, out, "another/checkpoint-2", False)
    assert refused(folders.refuse_occupied, old_run / "new", None, False) == ""


def test_a_name_that_leaves_no_room_is_refused_before_anything_is_made(tmp_path):
    longest = "ä" * 114  # 228 bytes
    for name in (longest, "n" * 228):
        out = tmp_path / name
        assert refused(folders.refuse_long_name, out) == ""
        write(out / "metrics.json", "{}")
        for _ in range(2):  # the second time an earlier one is deleted
            folders.claim_output_dir(out, True)
            write(out / "metrics.json", "{}")
    for name in (f"{longest}n", "n" * 250, "n" * 300, f"{'n' * 256}/out"):
        assert "ZR798" in refused(folders.refuse_long_name, tmp_path / name)
    recipe = write_recipe(tmp_path, output_dir=str(tmp_path / ("n" * 300)))
    run, findings = preflight(recipe, read_recipe_file(recipe), [], {})
    assert run is None and [found.code for found in findings if found.level == "error"] == ["ZR798"]


FOREIGN = ("samples.jsonl", "config.json", "README.md", "checksums.json", "failure.rank0.json", "tokenizer.json")


@pytest.mark.parametrize("name", [*FOREIGN, "adapter_model.safetensors"])
def test_files_that_no_run_has_written_are_not_written_over(tmp_path, name):
    write(tmp_path / name, "mine")
    for resume, overwrite, code in ((None, False, "ZR702"), ("true", False, "ZR702"), (None, True, "ZR752")):
        assert code in refused(folders.refuse_occupied, tmp_path, resume, overwrite)
    write(tmp_path / "metrics.json", '{"status": "failed"}')  # a run of ours that has failed begins again
    assert name.endswith(".safetensors") or refused(folders.refuse_occupied, tmp_path, None, False) == ""


@pytest.mark.parametrize(
    ("data", "out", "is_refused"),
    [
        ("rows", "rows/a/out", True),
        ("out/rows.jsonl", "out", True),
        ("link", "rows", True),
        ("rows", "rows-out", False),
    ],
)
def test_a_run_does_not_write_among_its_data(tmp_path, data, out, is_refused):
    write(tmp_path / "rows" / "train.jsonl")
    write(tmp_path / "out" / "rows.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    message = refused(folders.refuse_occupied, tmp_path / out, None, False, [("dataset_name", tmp_path / data)])
    assert ("ZR753" in message) == is_refused


def test_what_a_killed_run_left_half_done_is_cleared_and_nothing_else(old_run, monkeypatch):
    out, previous, users = old_run / "out", old_run / "out.previous", old_run / "out" / "x.mp4.part"
    write(users)
    write(out / f".checkpoint-4-zero2-world1{PART}" / "trainer_state.json")
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_text(out / "metrics.json", "{")
    folders.claim_output_dir(out, False)
    assert users.exists() and not list(out.glob(f"*{PART}"))
    folders.claim_output_dir(out, True)
    write(out / "metrics.json", '{"status": "ok"}')
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(folders.shutil, "rmtree", half_of)
        folders.claim_output_dir(out, True)
    assert {path.name for path in previous.iterdir()} == {"metrics.json"}, "the half that is left has its name"
    write(out / "metrics.json", '{"status": "ok"}')
    assert refused(folders.refuse_occupied, out, None, True) == ""
    assert folders.claim_output_dir(out, True) == previous and not list(old_run.glob(f"*{PART}"))


def half_of(folder: Path, ignore_errors: bool) -> None:
    """Deletes a file of a folder, and is killed; where there is no folder, nothing."""
    if folder.exists():
        (folder / "metrics.json").unlink()
        raise KeyboardInterrupt
