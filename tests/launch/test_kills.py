"""Killed runs lose nothing: SIGKILL of a rank anywhere, inside a save too, SIGTERM of the launcher, a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import cases, checkpoint_cases
from tests.helpers.interrupted import FILLER, LEFT, PLACES, RANK_0_ONLY
from tests.helpers.resuming import resume_recipe
from tests.helpers.seeded import count, draw, grid
from tests.helpers.tiny import ROOT, arguments
from tests.helpers.two_ranks import two_ranks
from zero_recipes.checkpoint.folders import numbered
from zero_recipes.checkpoint.resume import checkpoint_to_resume
from zero_recipes.checkpoint.save import checkpoint_fault, is_unfinished

RESUME = ("--resume_from_checkpoint", "true")

pytestmark = pytest.mark.launch


def launch(strategy: str, recipe: Path, output_dir: Path, kill: str | None) -> tuple[int, str]:
    """(exit code, everything printed) of `zero-recipes train` that is killed as tests/helpers/interrupted.py says."""
    script = recipe.parent / "run_sft.py"
    if not script.is_symlink():
        script.symlink_to(ROOT / "tests" / "helpers" / "interrupted.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {} if kill is None else {"KILL": kill}
    command = [sys.executable, "-m", "zero_recipes.tools.main", "train", str(recipe), "--output_dir", str(output_dir)]
    command += ["--config_file", f"{strategy}.yaml", "--num_processes", "2", *RESUME]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, cwd=recipe.parent, env=environment, text=True, timeout=400, **pipes)
    return ended.returncode, ended.stdout


def assert_equal(group, folders: list[Path], step: int) -> None:
    """The last checkpoints hold the same bits."""
    one, other = (str(folder / f"checkpoint-{step}") for folder in folders)
    gaps = group.run(checkpoint_cases.checkpoint_gaps, one=one, other=other)[0]
    assert (gaps["weights"], gaps["states"]) == (0.0, 0.0) and gaps["tensors"] > 40


@pytest.mark.parametrize("launched", [False, grid(True)])
def test_sigkill_inside_a_save_and_sigterm(two, tmp_path, launched):
    """Of the launcher, or of a rank by itself."""
    recipe = resume_recipe(tmp_path, save_steps=2, save_total_limit=1)
    whole = two.run(cases.train, argv=arguments(recipe, "zero3", tmp_path / "whole"))[0]["metrics"]
    out = tmp_path / "out"

    argv, killed = arguments(recipe, "zero3", out, *RESUME), {"KILL": "optimizer:1:4"}
    ranks = two_ranks(argv, tmp_path, killed, script="tests/helpers/interrupted.py")
    assert "starting fresh" in ranks[0].stdout, ranks[0].stderr[-3000:]
    assert ranks[0].returncode > 0 and ranks[1].returncode == -signal.SIGKILL
    assert "PeerFailed: " in ranks[0].stderr and "checkpoint-4 is not saved, because another rank" in ranks[0].stderr
    assert "Traceback" not in ranks[0].stderr and "space" not in ranks[0].stderr
    assert json.loads((out / "metrics.json").read_text())["status"] == "failed"
    assert [path.name for path in numbered(out)] == ["checkpoint-2", "checkpoint-4"]
    assert is_unfinished(out / "checkpoint-4") and checkpoint_fault(out / "checkpoint-2") is None
    optimizer = sorted((out / "checkpoint-4").rglob("*rank_1*optim*"))
    assert optimizer and optimizer[0].stat().st_size > 0, "it was not killed inside the file"

    if launched:
        code, said = launch("zero3", recipe, out, "terminate:0:6")
    else:
        extra = {"KILL": "signal:0:6"}
        ranks = two_ranks(argv, tmp_path, extra, script="tests/helpers/interrupted.py")
        code, said = ranks[1].returncode, ranks[0].stdout + ranks[0].stderr
    assert code == 75 and f"skipped: {out}/checkpoint-4 is incomplete" in said, said[-3000:]
    assert f"resuming from {out}/checkpoint-2" in said and f"deleted: {out}/checkpoint-4" in said
    assert "a signal ended the run; it is saved as" in said
    assert [path.name for path in numbered(out)] == ["checkpoint-6"], "save_total_limit was not kept"

    rest = two.run(cases.train, argv=arguments(recipe, "zero3", out, *RESUME))[0]["metrics"]
    assert rest["loss_history"] == whole["loss_history"] and rest["resumed_at"] == [2, 6]
    assert_equal(two, [tmp_path / "whole", out], 7)


@pytest.mark.parametrize("strategy", ["fsdp2", grid("zero3"), grid("ddp")])
def test_a_full_disk_leaves_the_earlier_checkpoint(two, tmp_path, request, strategy):
    """The room is there when the run starts (checks/capacity.py refuses otherwise), then another program takes it."""
    recipe = resume_recipe(tmp_path, save_steps=2)
    whole = two.run(cases.train, argv=arguments(recipe, strategy, tmp_path / "whole"))[0]["metrics"]
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here (no root)")
    request.addfinalizer(lambda: subprocess.run(["umount", str(disk)], check=True))
    out = disk / "out"
    argv = arguments(recipe, strategy, out)
    ranks = two_ranks(argv, tmp_path, {"KILL": "disk:0:4"}, script="tests/helpers/interrupted.py")
    said = "".join(rank.stderr for rank in ranks)
    assert "Traceback" not in said and all(rank.returncode > 0 for rank in ranks), said[-3000:]
    assert f"{out}/checkpoint-4 could not be saved: its disk is full (" in said
    assert is_unfinished(out / "checkpoint-4") and checkpoint_fault(out / "checkpoint-2") is None
    assert shutil.disk_usage(disk).free > LEFT, "it takes up room"
    row = json.loads((out / "metrics.json").read_text())
    assert (row["status"], row["failure"]["phase"]) == ("failed", "save") and "its disk is full" in row["error"]
    (disk / FILLER).unlink()
    rest = two.run(cases.train, argv=arguments(recipe, strategy, out, *RESUME))[0]["metrics"]
    assert rest["loss_history"] == whole["loss_history"] and rest["resumed_at"] == [2]


def drawn_kills(strategy: str, number: int) -> list[tuple[str, int]]:
    """[(KILL, step of the last whole checkpoint after it)]: every place in turn, at random steps, on random ranks."""
    chance, kills, whole = draw("kills", strategy), [], 0
    places = [place for _ in range(number) for place in chance.sample(PLACES, len(PLACES))][:number]
    for place in places:
        step = whole + chance.choice([1, 1, 2, 2, 3])
        if place == "rotation" and step == 1:
            step = 2  # there must be an older one
        alone = place in RANK_0_ONLY or (place == "optimizer" and not strategy.startswith("zero"))
        rank = 0 if alone else chance.randrange(2)
        whole = step if place == "rotation" else step - 1
        kills.append((f"{place}:{rank}:{step}", whole))
    return kills


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp", "fsdp2"])
def test_a_run_that_is_killed_eleven_times(two, tmp_path, strategy):
    """One checkpoint a step, one kept: each launch goes on from the last whole one."""
    kills = drawn_kills(strategy, 11)
    steps = kills[-1][1] + 3
    recipe = resume_recipe(tmp_path, save_steps=1, save_total_limit=1, max_steps=steps)
    whole = two.run(cases.train, argv=arguments(recipe, strategy, tmp_path / "whole"))[0]["metrics"]
    out = tmp_path / "out"
    for kill, last in kills:
        code, said = launch(strategy, recipe, out, kill)
        # a launcher that looks late first finds the other rank, which has lost its peer
        assert code == 1 and ("exitcode: -9" in said or "by peer" in said), f"{kill}: {said[-3000:]}"
        expected = str(out / f"checkpoint-{last}") if last else None
        assert checkpoint_to_resume(out, "true") == expected, kill
    code, said = launch(strategy, recipe, out, None)
    assert code == 0, said[-3000:]
    rest = json.loads((out / "metrics.json").read_text())
    assert rest["loss_history"] == whole["loss_history"] and len(rest["loss_history"]) == steps
    assert rest["tokens"] == whole["tokens"] and rest["resumed_at"] == sorted({last for _, last in kills} - {0})
    assert_equal(two, [tmp_path / "whole", out], steps)
    entry = {"number": len(kills), "steps": steps, "loss": 0.0, "weights": 0.0, "states": 0.0}
    count("kills", strategy, **entry, moments=[kill for kill, _ in kills])
