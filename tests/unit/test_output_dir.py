"""One run at a time in an output folder; `--overwrite true` keeps what was there, never takes what the run reads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from multiprocessing import get_context
from pathlib import Path

import pytest

from zero_recipes.checkpoint import output_dir
from zero_recipes.checkpoint.output_dir import (
    LOCK,
    claim_output_dir,
    hold_output_dir,
    inputs_of,
    refuse_in_use,
    refuse_occupied,
    saved_in,
)
from zero_recipes.checkpoint.save import begin_checkpoint, write_manifest
from zero_recipes.config.recipe import parse_recipe
from zero_recipes.core.findings import Finding, Refusal

FORK = get_context("fork")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(output_dir, "LOCK_SECONDS", 0.1)
    monkeypatch.delenv("RANK", raising=False)


def contents(folder: Path) -> dict[str, str | bytes]:
    """{name: text of a file, target of a link, "" of a folder}, links not followed."""
    found: dict[str, str | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal_of(work, *arguments) -> str:
    try:
        work(*arguments)
        return ""
    except Refusal as refusal:
        return str(refusal)


# the lock


def hold(folder: Path, pipe) -> None:
    with hold_output_dir(folder):
        pipe.send("held")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/out: (the process, a function that ends it well)."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(tmp_path / "out", theirs))
    process.start()
    assert ours.recv() == "held"
    yield process, lambda: (ours.send("end"), process.join())
    process.kill()


def test_a_second_start_is_refused_and_touches_nothing(tmp_path, holder):
    out, (process, _) = tmp_path / "out", holder
    for start in (refuse_in_use, lambda out: hold_output_dir(out).__enter__()):
        assert "ZR747" in refusal_of(start, out)
        assert sorted(path.name for path in out.iterdir()) == [LOCK]
    process.kill()
    process.join()
    assert refusal_of(refuse_in_use, out) == "", "the lock of a killed run is not stale"
    with hold_output_dir(out):
        assert "ZR747" in refusal_of(refuse_in_use, out)
    assert refusal_of(refuse_in_use, out) == "" and list(out.iterdir()) == []


def test_the_lock_goes_on_in_the_folder_that_takes_the_place_of_the_old_one(tmp_path, holder):
    out, (_, end) = tmp_path / "out", holder
    end()
    write(out / "metrics.json", '{"status": "ok"}')
    with hold_output_dir(out):
        claim_output_dir(out, True)
        assert FORK.Pool(1).apply(refusal_of, (refuse_in_use, out)).count("ZR747") == 1
        assert not (tmp_path / "out.previous" / LOCK).exists()
    assert list(out.iterdir()) == []


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(Refusal), hold_output_dir(tmp_path / "a" / "b" / "c"):
        raise Refusal([Finding("ZR000", "", "", "")])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Refusal), hold_output_dir(tmp_path / "a" / "b"):
        write(tmp_path / "a" / "b" / "somebody's")
        raise Refusal([Finding("ZR000", "", "", "")])
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["somebody's"]


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_output_dir(tmp_path):
        assert "without locks: another run in it is not seen" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    write(tmp_path / "file")
    assert "ZR748" in refusal_of(hold_output_dir(tmp_path / "file" / "out").__enter__)
    assert "ZR748" in refusal_of(refuse_occupied, tmp_path / "file" / "out", None, False)


# what is kept


@pytest.fixture
def old_run(tmp_path, monkeypatch) -> Path:
    """A finished run in `out`, in the working directory, and links to it."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    for name in ("model.safetensors", "config.json", "samples.jsonl", "recipe.resolved.yaml", "mine/notes.txt"):
        write(out / name, "{}")
    write(out / "metrics.json", '{"status": "ok"}')
    begin_checkpoint(out / "checkpoint-4")
    write(out / "checkpoint-4" / "model.safetensors", "w")
    write_manifest(out / "checkpoint-4", {"step": 4})
    write(tmp_path / "other" / "rows.jsonl", "rows")
    (out / "link").symlink_to(tmp_path / "other")  # the link goes, not what it leads to
    (tmp_path / "linked").symlink_to(out / "checkpoint-4")
    (tmp_path / "twice").symlink_to(tmp_path / "linked")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(out / "model.safetensors")
    (tmp_path / "mounted").mkdir()
    os.link(out / "samples.jsonl", tmp_path / "mounted" / "rows.jsonl")  # as a bind mount: the same file elsewhere
    write(tmp_path / "adapter" / "adapter_config.json", json.dumps({"base_model_name_or_path": "./twice"}))
    return tmp_path


def test_the_folder_is_kept_whole_and_only_once(old_run):
    out, previous = old_run / "out", old_run / "out.previous"
    for number in range(3):
        write(out / "metrics.json", json.dumps({"status": "ok", "number": number}))
        before = contents(out)
        assert claim_output_dir(out, True) == previous and contents(out) == {} and contents(previous) == before
        write(out / "metrics.json", '{"status": "failed"}')
        assert claim_output_dir(out, True) is None, "a run that saved nothing would push out the results"
        assert contents(previous) == before


def test_a_deletion_that_was_cut_off_is_gone_on_with(old_run, monkeypatch):
    """Killed after any file of the folder that was kept before: the same command goes on."""
    kept = shutil.copytree(old_run / "out", old_run / "kept", symlinks=True)
    shutil.rmtree(kept / "checkpoint-4")
    unlink = Path.unlink
    for number in range(5):
        shutil.rmtree(old_run / "out.previous", ignore_errors=True)
        shutil.copytree(kept, old_run / "out.previous", symlinks=True)
        left = iter([True] * number)

        def killed(self, missing_ok=False, left=left):
            if not next(left, False):
                raise KeyboardInterrupt
            unlink(self, missing_ok)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "unlink", killed)
            claim_output_dir(old_run / "out", True)
        assert refusal_of(refuse_occupied, old_run / "out", None, True) == ""
    assert claim_output_dir(old_run / "out", True) == old_run / "out.previous"


def test_a_link_keeps_its_folder_beside_what_it_leads_to(old_run):
    (old_run / "disk").mkdir()
    (old_run / "out").rename(old_run / "disk" / "real")
    (old_run / "out").symlink_to(old_run / "disk" / "real")
    assert claim_output_dir(old_run / "out", True) == old_run / "disk" / "real.previous"
    assert (old_run / "out").is_symlink() and contents(old_run / "out") == {}


def test_without_overwrite_failures_alone_go(old_run):
    out = old_run / "out"
    write(out / "failure.rank0.json")
    kept = {*contents(out), "failure.rank-notes.json"} - {"failure.rank0.json"}
    write(out / "failure.rank-notes.json")
    assert claim_output_dir(out, False) is None and set(contents(out)) == kept


@pytest.mark.parametrize("where", ["out", "out.previous"])
def test_what_another_program_wrote_is_neither_renamed_nor_deleted(old_run, where):
    write(old_run / where / "model.safetensors", "downloaded")
    for name in ("metrics.json", "recipe.resolved.yaml", "checkpoint-4/manifest.json"):
        (old_run / where / name).unlink(missing_ok=True)
    before = contents(old_run)
    for work in (lambda: refuse_occupied(old_run / "out", None, True), lambda: claim_output_dir(old_run / "out", True)):
        assert "holds no run of zero-recipes" in refusal_of(work)
    assert contents(old_run) == before


def test_what_cannot_be_renamed_is_a_refusal(old_run, monkeypatch):
    """The folder is a mount of its own."""

    def rename(self, target):
        raise OSError(errno.EBUSY, "Device or resource busy", str(self))

    before = contents(old_run)
    monkeypatch.setattr(Path, "rename", rename)
    assert "Device or resource busy" in refusal_of(claim_output_dir, old_run / "out", True)
    assert contents(old_run) == before


# what the run reads


READ = {
    "the model": {"model_name_or_path": "out"},
    "the model with a slash": {"model_name_or_path": "./other/../out/"},
    "the model in a checkpoint": {"model_name_or_path": "out/checkpoint-4"},
    "the model by two links": {"model_name_or_path": "twice"},
    "the model whose weights are a link": {"model_name_or_path": "model"},
    "the adapter's base": {"model_name_or_path": "adapter"},
    "the checkpoint": {"resume_from_checkpoint": "twice"},
    "the rows, mounted twice": {"dataset_name": "mounted"},
    "a mixture": {"datasets": [{"path": "other"}, {"path": "./out"}]},
    "a mixture's files": {"datasets": [{"path": "json", "data_files": {"train": "./out/*.jsonl"}}]},
    "a mixture's files below its path": {"datasets": [{"path": "out", "data_files": "samples.jsonl"}]},
    "the prompts": {"sample_prompts": "out/samples.jsonl"},
    "the DeepSpeed configuration": {"deepspeed": "./out/recipe.resolved.yaml"},
    "what would be deleted": {"model_name_or_path": "out.previous"},
    "any other key": {"model_init_kwargs": {"adapter": {"path": "./out/checkpoint-4/model.safetensors"}}},
}
NOT_READ = {
    "another model": {"model_name_or_path": "other"},
    "rows beside it": {"dataset_name": "other/rows.jsonl"},
    "a model above it": {"model_name_or_path": "."},
    "a model of the hub": {"model_name_or_path": "out/none", "dataset_name": "json"},
    "a split of that name": {"dataset_train_split": "out"},
    "odd text": {"chat_template_path": "{{ a\0b }}" + "x" * 5000},
}


def overwriting(folder: Path, keys: dict, recipe: str = "recipe.yaml", environment: dict | None = None) -> str:
    """The refusal of a run that overwrites `out`."""
    mapping = {"dataset_name": "json", "output_dir": "out"} | keys
    settings = parse_recipe(write(folder / "recipe.yaml", json.dumps(mapping)), dict(mapping), []).settings
    return refusal_of(refuse_occupied, Path("out"), None, True, inputs_of(settings, Path(recipe), environment or {}))


@pytest.mark.parametrize("keys", READ.values(), ids=READ)
def test_what_a_run_reads_is_never_taken_away(old_run, keys):
    shutil.copytree(old_run / "out", old_run / "out.previous")
    before = contents(old_run)
    said = overwriting(old_run, keys)
    assert "ZR751" in said and next(iter(keys)) in said
    (old_run / "recipe.yaml").unlink()
    assert contents(old_run) == before


@pytest.mark.parametrize("keys", NOT_READ.values(), ids=NOT_READ)
def test_what_a_run_does_not_read_may_go(old_run, keys):
    assert overwriting(old_run, keys) == ""


def test_the_recipe_the_launchers_file_and_the_working_directory_are_read_too(old_run, monkeypatch):
    assert "ZR751" in overwriting(old_run, {}, recipe="out/recipe.resolved.yaml")
    launcher = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "out/checkpoint-4/manifest.json"}
    assert "ZR751" in overwriting(old_run, {}, environment=launcher)
    monkeypatch.chdir(old_run / "out")
    settings = parse_recipe(old_run / "recipe.yaml", {"dataset_name": "json"}, []).settings
    assert "the working directory" in refusal_of(
        refuse_occupied, Path("."), None, True, inputs_of(settings, Path("r.yaml"), {})
    )


def test_an_occupied_folder_is_refused_by_what_it_holds(old_run):
    out = old_run / "out"
    assert [path.name for path in saved_in(out)] == ["checkpoint-4", "model.safetensors", "metrics.json"]
    said = refusal_of(refuse_occupied, out, None, False)
    assert "checkpoint-4, model.safetensors, metrics.json [ZR702]" in said and str(old_run / "out.previous") in said
    for resume, overwrite in (("true", False), (str(out / "checkpoint-4"), False), (None, True)):
        assert refusal_of(refuse_occupied, out, resume, overwrite) == ""
    assert "ZR702" in refusal_of(refuse_occupied, out, "another/checkpoint-2", False)
    assert refusal_of(refuse_occupied, old_run / "new", None, False) == ""
