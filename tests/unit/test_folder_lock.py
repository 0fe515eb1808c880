"""Of two processes that would write into one folder, tools too, the second waits or is refused, and nothing is lost."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT
from tests.helpers.tools import contents, refusal_of
from tests.unit.test_reshard_files import write_checkpoint
from zero_recipes.checkpoint import output_dir as folders
from zero_recipes.checkpoint import save
from zero_recipes.checkpoint.folders import rotate
from zero_recipes.checkpoint.resume import Batch
from zero_recipes.core import folder_lock
from zero_recipes.core.files import PART
from zero_recipes.core.findings import Refusal, refusal
from zero_recipes.core.folder_lock import LOCK, held
from zero_recipes.tools import ask as asking
from zero_recipes.tools import main as cli
from zero_recipes.tools import reshard as resharding
from zero_recipes.tools.reshard import reshard
from zero_recipes.training.answers import Answers

FORK = get_context("fork")
BASE = ROOT / "tiny_world" / "base"
ROUNDS = 6


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.1)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    found = write_checkpoint(tmp_path / "out")
    save.write_manifest(found, {"step": 7})
    return found


def assert_whole(folder: Path) -> None:
    assert save.checkpoint_fault(folder) is None and save.content_fault(folder) is None


def test_a_refused_tool_leaves_the_lock_of_who_comes_next(tmp_path, monkeypatch):
    """Between the end of its own and the removal of an empty folder."""
    folder = tmp_path / "out"
    taken = []
    monkeypatch.setattr(Path, "rmdir", lambda path: taken.append(folder_lock.take(path, "another run")))
    with pytest.raises(Refusal), held(folder, "a tool"):
        raise refusal("ZR902", out=folder)
    assert "another run (process " in str(refusal_of(folder_lock.take, folder, "a third"))
    folder_lock.give_back(taken[0], folder)
    assert not (folder / LOCK).exists()


def answer(work: Callable, arguments: tuple, barrier, pipe: Connection) -> None:
    """Send what `work` returns, or why it fails."""
    barrier.wait()
    try:
        pipe.send(str(work(*arguments)))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def at_once(*calls: tuple) -> list[str]:
    """What these calls, each (function, arguments), come to in processes that begin together."""
    barrier = FORK.Barrier(len(calls))
    started = []
    for work, *arguments in calls:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=answer, args=(work, tuple(arguments), barrier, theirs), daemon=True)
        process.start()
        started.append((process, ours))
    found = []
    for process, pipe in started:
        assert pipe.poll(120), "it hangs"
        found.append(pipe.recv())
        process.join()
    return found


@contextmanager
def holding(folder: Path, writer: str) -> Iterator:
    """Another process holds the folder inside. Yields the process."""

    def hold(pipe: Connection) -> None:
        with held(folder, writer):
            pipe.send("held")
            pipe.recv()

    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() == "held"
    yield process
    process.kill()
    process.join()


def pause_in_reshard(pipe: Connection, checkpoint: Path) -> None:
    original = resharding.read_parameter

    def read(source, name):
        if name == "b.weight":
            pipe.send("in it")
            pipe.recv()
        return original(source, name)

    resharding.read_parameter = read
    pipe.send(str(reshard(checkpoint, 1, 2)[0]))


@pytest.fixture
def paused(checkpoint) -> Iterator[tuple]:
    """(a process that waits in the midst of a reshard for one process at stage 2, the pipe that lets it go on)."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=pause_in_reshard, args=(theirs, checkpoint), daemon=True)
    process.start()
    assert ours.recv() == "in it"
    yield process, ours
    process.kill()
    process.join()


def test_two_reshards_at_once_make_one_copy(checkpoint):
    for _ in range(ROUNDS):
        found = at_once((reshard, checkpoint, 1, 2), (reshard, checkpoint, 1, 2))
        target = checkpoint.with_name("checkpoint-7-zero2-world1")
        exists = [text for text in found if "[ZR741]" in text]  # it came after the end of the other
        assert found.count(found[0]) == 2 or len(exists) == 1, found
        assert not [text for text in found if "Error" in text]
        assert_whole(target)
        assert sorted(path.name for path in target.parent.iterdir()) == ["checkpoint-7", target.name]
        shutil.rmtree(target)


def test_reshards_of_other_layouts_come_one_after_another(checkpoint):
    found = at_once(*((reshard, checkpoint, world, stage) for world, stage in ((1, 2), (2, 1), (4, 3))))
    assert not [text for text in found if "rror" in text or "refused" in text], found
    for path in checkpoint.parent.glob("checkpoint-7-*"):
        assert_whole(path)
    assert len(list(checkpoint.parent.iterdir())) == 4


def reshard_telling(pipe: Connection, checkpoint: Path) -> None:
    """Send what it prints, and then what it returns."""
    folder_lock.print = lambda text, **_: pipe.send(text)
    pipe.send(str(reshard(checkpoint, 1, 2)))


def test_the_second_of_one_target_waits_and_takes_what_the_first_has_made(checkpoint, paused):
    process, pipe = paused
    ours, theirs = FORK.Pipe()
    second = FORK.Process(target=reshard_telling, args=(theirs, checkpoint), daemon=True)
    second.start()
    assert ours.recv().startswith(f"waiting for reshard (process {process.pid} on ")
    pipe.send("go on")
    target = Path(pipe.recv())
    assert ours.recv() == str((target, Batch(2, 2, 2).over(1)))
    second.join()
    assert_whole(target)


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(checkpoint, monkeypatch, capsys):
    """Between its lock and its name, or between the end of one and the next."""
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.0)
    out = checkpoint.parent
    names = iter([None, None, "reshard"])  # what is read at each try

    def holder(_: Path) -> dict:
        name = next(names, None)
        if name is None:
            return {}
        process.kill()
        process.join()
        return {"writer": name, "process": process.pid, "host": "here"}

    with holding(out, "reshard") as process:
        monkeypatch.setattr(folder_lock, "_holder", holder)
        folder_lock.give_back(folder_lock.take(out, "reshard", waits_for="reshard"), out)
    assert "waiting for reshard" in capsys.readouterr().out


def test_a_holder_without_a_name_is_not_waited_for_without_end(checkpoint, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.0)
    with holding(checkpoint.parent, "reshard"):
        (checkpoint.parent / LOCK).write_text("")
        refused = refusal_of(folder_lock.take, checkpoint.parent, "reshard", "reshard")
    assert refused.codes == ["ZR747"] and "another process" in refused.what


def test_a_run_does_not_take_the_folder_from_a_reshard(checkpoint, paused):
    process, pipe = paused
    out = checkpoint.parent
    part = out / f".checkpoint-7-zero2-world1{PART}"
    refused = refusal_of(folders.hold_output_dir(out).__enter__)
    assert refused.codes == ["ZR747"] and f"reshard (process {process.pid} on " in refused.what
    assert part.is_dir()
    pipe.send("go on")
    assert_whole(Path(pipe.recv()))
    process.join()
    with folders.hold_output_dir(out):
        folders.claim_output_dir(out, False)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-7", "checkpoint-7-zero2-world1"]


def test_a_killed_reshard_blocks_nobody(checkpoint, paused):
    process, _ = paused
    process.kill()
    process.join()
    assert (checkpoint.parent / LOCK).exists()
    assert_whole(reshard(checkpoint, 1, 2)[0])
    assert not (checkpoint.parent / LOCK).exists()


def test_what_holds_the_folder_for_a_reshard_is_its_run(checkpoint, monkeypatch):
    out = checkpoint.parent
    with folders.hold_output_dir(out):
        refused = refusal_of(reshard, checkpoint, 1, 2)
        assert refused.codes == ["ZR747"] and "a run (process " in refused.what
        monkeypatch.setenv(folder_lock.HELD, str(out.parent))
        assert refusal_of(reshard, checkpoint, 1, 2).codes == ["ZR747"], "another folder is held"
        monkeypatch.setenv(folder_lock.HELD, str(out))
        assert_whole(reshard(checkpoint, 1, 2)[0])
        assert (out / LOCK).exists(), "the run still holds it"


@pytest.mark.parametrize("place", ["_copy_random_states", "_write_states", "open_checkpoint", "read_parameter"])
def test_a_source_that_is_rotated_away_meanwhile(checkpoint, monkeypatch, place):
    """By a run that holds no lock: the file system has none."""
    save.begin_checkpoint(checkpoint.with_name("checkpoint-9"))
    original = getattr(resharding, place)

    def rotated(*arguments):
        if checkpoint.exists():
            rotate(checkpoint.parent, 1, None)
        return original(*arguments)

    monkeypatch.setattr(resharding, place, rotated)
    assert refusal_of(reshard, checkpoint, 1, 2).codes == ["ZR850"]
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-9"]


# tools


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Say x."}) + "\n")
    return path


def ask(out: Path, prompts: Path) -> int:
    words = ["ask", BASE, "--base", "none", "--output_dir", out, "--sample_prompts", prompts]
    return cli.main([str(word) for word in words])


def test_of_two_asks_at_once_one_answers(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(asking, "answers_of_both", lambda *_: (None, Answers(["x"], [None])))
    for number in range(3):
        out = tmp_path / f"asked{number}"
        assert sorted(at_once((ask, out, prompts), (ask, out, prompts))) == ["0", "2"]
        assert [path.name for path in out.iterdir()] == ["samples.jsonl"]


def test_no_tool_writes_where_a_run_does(tmp_path, prompts, capsys):
    out = tmp_path / "out"
    shutil.copytree(BASE, out)
    (out / "metrics.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model_name_or_path": str(BASE), "dataset_name": str(ROOT / "tiny_world")}))
    words = {
        "ask": [BASE, "--base", "none", "--output_dir", out, "--sample_prompts", prompts],
        "export": [BASE, "--base", "none", "--output_dir", out],
        "push": [out, "--hub_model_id", "me/taught"],
        "sweep": [recipe, "--strategies", "ddp", "--num_processes", "1", "--output_dir", out],
    }
    with holding(out, "a run") as process:
        before = contents(out)
        for verb, others in words.items():
            capsys.readouterr()
            assert cli.main([verb, *map(str, others)]) == 2, verb
            said = capsys.readouterr().err
            assert f"a run (process {process.pid} on " in said and "[ZR747]" in said, verb
        assert contents(out) == before


def test_a_tool_that_is_refused_leaves_no_empty_folder(tmp_path, prompts, monkeypatch):
    out = tmp_path / "asked"

    def refuse(*_):
        raise folder_lock.refusal("ZR570", folder=out)

    monkeypatch.setattr(asking, "answers_of_both", refuse)
    assert ask(out, prompts) == 2 and not out.exists()
