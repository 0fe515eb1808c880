"""`overwrite: true` replaces what a run of ours left, and nothing else; killed anywhere, nothing saved is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from zero_recipes.checkpoint import manifest, overwrite
from zero_recipes.checkpoint.output_dir import claim_output_dir, refuse_occupied
from zero_recipes.config.paths_read import inputs_of
from zero_recipes.config.recipe import parse_recipe
from zero_recipes.core.findings import Refusal

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(2, 60))]


class Killed(BaseException):
    """What a process that is killed at this place would not do any more."""


class Operations:
    """Counts what changes files below a folder, and dies before the one that is asked for."""

    EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")

    def __init__(self):
        self.left: int | None = None
        self.seen = 0
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple) -> None:
        if self.left is None or event not in self.EVENTS or (event == "open" and not (arguments[2] & os.O_CREAT)):
            return
        self.seen += 1
        if self.seen > self.left:
            self.left = None
            raise Killed

    def killed_before(self, number: int, work) -> bool:
        """Do the work, and die before operation `number` of it, from 0. Whether there was one."""
        self.left, self.seen = number, 0
        try:
            work()
            return False
        except Killed:
            return True
        finally:
            self.left = None


@pytest.fixture(scope="module")
def operations() -> Operations:
    return Operations()


def contents(folder: Path) -> dict[str, str | bytes]:
    """{name: text of a file, target of a link, "" of a folder}, links not followed."""
    found: dict[str, str | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
    return found


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def own_tree(folder: Path, draw: random.Random) -> None:
    """What a run of ours leaves: always something that is worth keeping."""
    for step in draw.sample(range(1, 200), draw.randint(1, 3)):
        checkpoint = folder / f"checkpoint-{step}"
        manifest.begin(checkpoint)
        for number in range(draw.randint(1, 4)):
            write(checkpoint / draw.choice(["", "global_step/", "a/b/"]) / f"{number}.pt", str(draw.random()))
        if draw.random() < 0.8:
            manifest.write(checkpoint, {"step": step})
    if draw.random() < 0.7:
        names = ["model.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors"]
        for name in [*draw.sample(names, draw.randint(1, 3)), "config.json", "tokenizer.json"]:
            write(folder / name, f"{name} {draw.random()}")
    for name in ("samples.jsonl", "recipe.resolved.yaml"):
        write(folder / name, str(draw.random()))
    if draw.random() < 0.8:
        write(folder / "metrics.json", json.dumps({"status": draw.choice(["ok", "failed"]), "tokens": draw.random()}))


FOREIGN = ("checkpoint-notes/a.txt", "checkpoint-12.bak/x.safetensors", "something.safetensors", "notes/checkpoint-3/y")
FOREIGN += ("overwritten-1/kept.txt", "overwritten-2.deleting/kept", "pytorch_model.bin", "README.md", "logs/events")
FOREIGN += ("failure.rank0.json.bak", "failure.rank-notes.json", "metrics.json.old", "model.safetensors.old", "log.txt")
FOREIGN += ("my-model-00001-of-00002.safetensors", "damaged-checkpoint-4/state.pt", "checkpoints/checkpoint-1/w.pt")


def foreign_tree(folder: Path, outside: Path, draw: random.Random) -> None:
    for name in draw.sample(FOREIGN, draw.randint(1, 8)):
        write(folder / name, f"foreign {draw.random()}")
    write(outside / "data.jsonl", "rows")
    links = {"data": outside, "rows.jsonl": outside / "data.jsonl", "nothing": folder / "gone", "self": folder}
    for name in draw.sample(list(links), draw.randint(0, 4)):
        (folder / name).symlink_to(links[name])


def random_tree(folder: Path, seed: int) -> tuple[dict, dict]:
    """(what is ours, what is foreign) of a random output folder, as `contents` tells it."""
    draw, out = random.Random(seed), folder / "out"
    out.mkdir()
    own_tree(out, draw)
    ours = contents(out)
    foreign_tree(out, folder / "outside", draw)
    return ours, {name: value for name, value in contents(out).items() if name not in ours}


def assert_kept(out: Path, ours: dict, foreign: dict, outside: dict) -> None:
    """Foreign things are as they were, and ours are in their place or whole in the one folder aside."""
    now = contents(out)
    assert {name: now.get(name) for name in foreign} == foreign and contents(out.parent / "outside") == outside
    asides = ["", *(f"{path.name}/" for path in overwrite.interrupted(out))]
    files = {name: value for name, value in ours.items() if value != ""}
    assert all(value in [now.get(aside + name) for aside in asides] for name, value in files.items())


def step_of_a_new_run(out: Path) -> None:
    """What is written between the claim and the first step."""
    write(out / "recipe.resolved.yaml", "of the new run")
    write(out / "metrics.json", '{"status": "failed"}')


def new_run(out: Path) -> None:
    """A whole run that overwrites: claim, its first files, its first step."""
    aside = claim_output_dir(out, True)
    step_of_a_new_run(out)
    overwrite.delete(aside)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_foreign_changes_and_ours_is_gone_after_the_first_step(tmp_path, seed):
    ours, foreign = random_tree(tmp_path, seed)
    out, outside = tmp_path / "out", contents(tmp_path / "outside")
    aside = claim_output_dir(out, True)
    assert not any((out / name).exists() for name in ours)
    assert_kept(out, ours, foreign, outside)
    step_of_a_new_run(out)
    overwrite.delete(aside)
    assert contents(out) == foreign | {
        "recipe.resolved.yaml": b"of the new run",
        "metrics.json": b'{"status": "failed"}',
    }
    assert contents(tmp_path / "outside") == outside


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_fails_before_its_first_step_leaves_the_folder_as_it_was(tmp_path, seed):
    ours, foreign = random_tree(tmp_path, seed)
    out = tmp_path / "out"
    aside = claim_output_dir(out, True)
    step_of_a_new_run(out)
    assert overwrite.put_back(aside) == []
    made = {name for name in ("metrics.json",) if name not in ours}  # the new run's, where there was none
    assert {name: value for name, value in contents(out).items() if name not in made} == ours | foreign


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_any_operation_nothing_is_lost(tmp_path, seed, operations):
    """Killed before each file operation in turn, and once more while the next start recovers from it."""
    draw, number, killed = random.Random(seed), 0, True
    ours, foreign = random_tree(tmp_path, seed)
    outside = contents(tmp_path / "outside")
    shutil.copytree(tmp_path / "out", tmp_path / "kept", symlinks=True)
    out = tmp_path / "out"
    while killed:
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "kept", out, symlinks=True)
        killed = operations.killed_before(number, lambda: new_run(out))
        committed = not killed or {path.name for path in out.glob("overwritten-*.deleting")} - foreign.keys()
        if not committed:
            assert_kept(out, ours, foreign, outside)
            operations.killed_before(draw.randint(0, 12), lambda: overwrite.recover(out))
            assert_kept(out, ours, foreign, outside)
            overwrite.recover(out)
            assert {name: (out / name).read_bytes() for name, value in ours.items() if value != ""} == {
                name: value for name, value in ours.items() if value != ""
            }
            new_run(out)  # the same command once more
        overwrite.recover(out)
        now = contents(out)
        assert {name: now.get(name) for name in foreign} == foreign
        assert not [name for name, value in ours.items() if value and value in now.values()]
        number += 1
    assert number > 10, "no operation was seen"


STRANGERS = {
    "a checkpoint of another program": lambda out: write(out / "checkpoint-500" / "optimizer.pt", "x"),
    "a manifest of another program": lambda out: write(out / "checkpoint-500" / "manifest.json", '{"name": "app"}'),
    "a file in a checkpoint": lambda out: write(
        next(out.glob("checkpoint-[0-9]*/manifest.json")).parent / "a.txt", "x"
    ),
    "a link in a checkpoint": lambda out: (
        next(out.glob("checkpoint-[0-9]*/manifest.json")).parent / "global_step1"
    ).symlink_to(out.parent),
    "a link to a checkpoint": lambda out: (out / "checkpoint-500").symlink_to(out.parent / "outside"),
    "a link to weights": lambda out: (out / "model-00009-of-00009.safetensors").symlink_to(out / "checkpoint-notes"),
    "a folder of a known name": lambda out: (out / "adapter_model-00001-of-00001.safetensors").mkdir(),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("seed", (3, 4))
def test_what_would_be_mixed_is_refused_by_name(tmp_path, make, seed):
    random_tree(tmp_path, seed)
    out = tmp_path / "out"
    manifest.begin(out / "checkpoint-400")
    manifest.write(out / "checkpoint-400", {"step": 400})
    made = make(out)
    before = contents(tmp_path)
    for call in (lambda: refuse_occupied(out, None, True), lambda: claim_output_dir(out, True)):
        with pytest.raises(Refusal, match="no run of zero-recipes left there") as caught:
            call()
        assert made is None or made.name in caught.value.what or made.parent.name in caught.value.what
        assert contents(tmp_path) == before


def test_a_model_beside_which_no_run_of_ours_was_stays(tmp_path):
    for name in ("model.safetensors", "config.json"):
        write(tmp_path / "out" / name, "downloaded")
    with pytest.raises(Refusal, match=r"model\.safetensors.*ZR750"):
        refuse_occupied(tmp_path / "out", None, True)
    write(tmp_path / "out" / "recipe.resolved.yaml", "of a run of ours")
    refuse_occupied(tmp_path / "out", None, True)


def test_a_failed_run_that_saved_nothing_gives_way_at_once(tmp_path):
    """Its metrics.json would come back and be taken for the new run's."""
    write(tmp_path / "metrics.json", '{"status": "failed"}')
    assert claim_output_dir(tmp_path, True) is None
    write(tmp_path / "metrics.json", '{"status": "ok"}')
    assert claim_output_dir(tmp_path, True) == tmp_path / "overwritten-1"


def test_what_cannot_be_moved_is_a_refusal_and_stays(tmp_path, monkeypatch):
    """A checkpoint that is a mount of its own, a folder without rights, a full disk: at any of the moves."""
    ours, foreign = random_tree(tmp_path, 5)
    out, real = tmp_path / "out", os.rename
    for number in range(4):
        moves = iter(range(100))

        def rename(source, target, moves=moves, number=number):
            if next(moves) == number:
                raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
            real(source, target)

        with monkeypatch.context() as patched, pytest.raises(Refusal, match=r"cannot be moved.*ZR752"):
            patched.setattr(os, "rename", rename)
            claim_output_dir(out, True)
        assert contents(out) == ours | foreign


def test_a_run_that_was_killed_is_named_to_those_that_do_not_overwrite(tmp_path):
    out = tmp_path / "out"
    random_tree(tmp_path, 1)
    aside = claim_output_dir(out, True)
    for resume in (None, "true"):
        with pytest.raises(Refusal, match=f"{aside} holds what an earlier run saved.*ZR749"):
            refuse_occupied(out, resume, False)
    refuse_occupied(out, None, True)


def test_what_stands_in_the_way_keeps_its_place(tmp_path):
    """Somebody has put a file there between the kill and the next start."""
    write(tmp_path / "recipe.resolved.yaml", "old")
    write(tmp_path / "model.safetensors", "old")
    aside = claim_output_dir(tmp_path, True)
    write(tmp_path / "model.safetensors", "somebody's")
    assert overwrite.put_back(aside) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "somebody's"
    assert (aside / "model.safetensors").read_text() == "old" and (tmp_path / "recipe.resolved.yaml").exists()


@pytest.fixture
def old_run(tmp_path, monkeypatch) -> Path:
    """A finished run in `out`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "config.json", "samples.jsonl", "recipe.resolved.yaml"):
        write(tmp_path / "out" / name, "{}")
    manifest.begin(tmp_path / "out" / "checkpoint-4")
    write(tmp_path / "out" / "checkpoint-4" / "model.safetensors", "w")
    manifest.write(tmp_path / "out" / "checkpoint-4", {"step": 4})
    write(tmp_path / "other" / "rows.jsonl", "rows")
    (tmp_path / "model").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "twice").symlink_to(tmp_path / "linked")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "out" / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "above").mkdir()
    (tmp_path / "above" / "old").symlink_to(tmp_path / "out")
    write(tmp_path / "adapter" / "adapter_config.json", json.dumps({"base_model_name_or_path": "./twice"}))
    return tmp_path


READ = {
    "the model": {"model_name_or_path": "out"},
    "the model with a slash": {"model_name_or_path": "./other/../out/"},
    "the model in a checkpoint": {"model_name_or_path": "out/checkpoint-4"},
    "the model by a link": {"model_name_or_path": "linked"},
    "the model by two links": {"model_name_or_path": "twice"},
    "the model whose weights are a link": {"model_name_or_path": "model"},
    "the adapter's base": {"model_name_or_path": "adapter"},
    "the checkpoint": {"resume_from_checkpoint": "twice"},
    "the rows": {"dataset_name": "out/checkpoint-4"},
    "the rows above": {"dataset_name": "."},
    "the rows by a link to a folder": {"dataset_name": "above"},
    "a mixture": {"datasets": [{"path": "other"}, {"path": "./out"}]},
    "a mixture's files": {"datasets": [{"path": "json", "data_files": {"train": "./out/*.jsonl"}}]},
    "a mixture's files below its path": {"datasets": [{"path": "out", "data_files": "samples.jsonl"}]},
    "the prompts": {"sample_prompts": "out/samples.jsonl"},
    "the chat template": {"chat_template_path": "out"},
    "the DeepSpeed configuration": {"deepspeed": "./out/recipe.resolved.yaml"},
    "a key that nobody thought of": {
        "model_init_kwargs": {"adapter": {"path": "./out/checkpoint-4/model.safetensors"}}
    },
}
NOT_READ = {
    "another model": {"model_name_or_path": "other"},
    "rows beside it": {"dataset_name": "other/rows.jsonl"},
    "a model of the hub": {"model_name_or_path": "out/none", "dataset_name": "json"},
    "a split of that name": {"dataset_train_split": "out"},
    "odd text": {"chat_template_path": "{{ a\0b }}" + "x" * 5000},
}


def settings_of(folder: Path, **keys):
    mapping = {"dataset_name": "json", "output_dir": "out"} | keys
    write(folder / "recipe.yaml", json.dumps(mapping))
    return parse_recipe(folder / "recipe.yaml", dict(mapping), []).settings


@pytest.mark.parametrize("keys", READ.values(), ids=READ)
def test_what_a_run_reads_is_never_deleted(old_run, keys):
    before = contents(old_run)
    inputs = inputs_of(settings_of(old_run, **keys), old_run / "recipe.yaml", {})
    with suppress(FileNotFoundError):
        (old_run / "recipe.yaml").unlink()
    for call in (refuse_occupied, None):
        with pytest.raises(Refusal, match=r"the run reads it.*ZR751") as caught:
            call(Path("out"), None, True, inputs) if call else claim_output_dir(Path("out"), True, inputs)
        assert next(iter(keys)) in caught.value.why
    assert contents(old_run) == before


@pytest.mark.parametrize("keys", NOT_READ.values(), ids=NOT_READ)
def test_what_a_run_does_not_read_may_go(old_run, keys):
    inputs = inputs_of(settings_of(old_run, **keys), old_run / "recipe.yaml", {})
    refuse_occupied(Path("out"), None, True, inputs)


def test_a_model_above_the_output_folder_is_read_without_it(tmp_path, monkeypatch):
    """Of a model's folder the files are read, of a folder of data all that is below it."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "out/model.safetensors", "out/recipe.resolved.yaml"):
        write(tmp_path / name, "{}")
    for keys, refused in (({"model_name_or_path": "."}, False), ({"dataset_name": "."}, True)):
        inputs = inputs_of(settings_of(tmp_path, **keys), tmp_path / "recipe.yaml", {})
        assert (overwrite_refusal(inputs) is not None) == refused


def overwrite_refusal(inputs) -> Refusal | None:
    try:
        return refuse_occupied(Path("out"), None, True, inputs)
    except Refusal as refusal:
        return refusal


def test_the_recipe_and_the_launchers_file_are_read_too(old_run):
    settings = settings_of(old_run)
    for recipe, environment in (
        ("out/recipe.resolved.yaml", {}),
        ("recipe.yaml", {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "out/checkpoint-4/manifest.json"}),
    ):
        with pytest.raises(Refusal, match="ZR751"):
            refuse_occupied(Path("out"), None, True, inputs_of(settings, Path(recipe), environment))


def test_the_first_refusal_does_not_lead_there(old_run):
    """`--overwrite true` is named as a way out only where it is one."""
    for keys, named in (({"model_name_or_path": "out"}, False), ({"model_name_or_path": "other"}, True)):
        inputs = inputs_of(settings_of(old_run, **keys), old_run / "recipe.yaml", {})
        with pytest.raises(Refusal, match="ZR702") as caught:
            refuse_occupied(Path("out"), None, False, inputs)
        assert ("--overwrite" in caught.value.fix) == named and "another --output_dir" in caught.value.fix


def seen_through(path: Path, deep: bool) -> dict[str, bytes]:
    """What a reader of a path finds there, links followed: of a folder its files, or all below it."""
    if path.is_file():
        return {"": path.read_bytes()}
    found = path.glob("**/*" if deep else "*")
    return {str(file.relative_to(path)): file.read_bytes() for file in found if file.is_file()}


KEYS = ("model_name_or_path", "dataset_name", "chat_template_path", "sample_prompts", "resume_from_checkpoint")


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_a_run_reads_is_there_after_it_has_overwritten(tmp_path, monkeypatch, seed):
    """Paths drawn from the folder, from links into it and from beside it: refused, or the same to read afterwards."""
    monkeypatch.chdir(tmp_path)
    draw, out = random.Random(seed), Path("out")
    random_tree(tmp_path, seed)
    inside = ["out", *(path.as_posix() for path in out.rglob("*"))]
    for number in range(8):
        target = draw.choice([*inside, *(f"link{earlier}" for earlier in range(number))])
        Path(f"link{number}").symlink_to(Path(target) if draw.random() < 0.5 else tmp_path / target)
    (tmp_path / "folder").mkdir()
    for number in range(3):
        (tmp_path / "folder" / f"{number}").symlink_to(tmp_path / draw.choice(inside))
    beside = ["outside", "folder", ".", "recipe.yaml", *(f"link{number}" for number in range(8))]
    refused = 0
    for _ in range(20):
        text = draw.choice(draw.choice([inside, beside]))
        key, written = draw.choice(KEYS), draw.choice([text, f"./{text}", str(tmp_path / text), f"outside/../{text}"])
        deep = key in ("dataset_name", "resume_from_checkpoint")
        inputs = inputs_of(settings_of(tmp_path, **{key: written}), tmp_path / "recipe.yaml", {})
        try:
            refuse_occupied(out, None, True, inputs)
        except Refusal as refusal:
            assert refusal.codes == ["ZR751"]
            refused += 1
            continue
        before = seen_through(Path(written), deep) if Path(written).exists() else None
        aside = claim_output_dir(out, True, inputs)
        assert before is None or seen_through(Path(written), deep) == before, f"{key}: {written}"
        overwrite.put_back(aside)
    assert 0 < refused < 20
