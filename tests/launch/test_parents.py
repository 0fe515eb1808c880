"""Ranks end with the launcher that started them, however it ends; never with a shell, or where a launcher detaches."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers import cases
from tests.helpers.resuming import resume_recipe
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, arguments
from zero_recipes.checkpoint.save import checkpoint_fault

pytestmark = pytest.mark.launch

# a rank: it says that it is there, and waits until nobody can write to it any more
RANK = """
import sys
from zero_recipes.core.process import end_with_launcher
end_with_launcher()
print("there", flush=True)
sys.stdin.read()
print("went on", flush=True)
"""
# what starts it: as a child; or through a process that ends at once, as of a launcher that detaches
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
DETACHED = "import os, subprocess, sys\nif os.fork() == 0:\n    subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
DETACHED += "else:\n    os.wait()\n    sys.stdin.read()"


@pytest.mark.parametrize(
    ("names", "script", "ends"),
    [
        (["accelerate", "launch"], CHILD, True),
        (["torch.distributed.run"], CHILD, True),
        (["/usr/bin/torchrun"], CHILD, True),
        (["zero-recipes", "train"], CHILD, True),
        (["bash", "accelerate.sh"], CHILD, False),
        ([], CHILD, False),
        (["accelerate", "launch"], DETACHED, False),
    ],
)
def test_a_rank_ends_with_its_launcher_alone(names, script, ends):
    """The words of a launcher's command line are all that a rank sees of it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", script, RANK, *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as launcher:
        assert launcher.stdout.readline() == "there\n"
        launcher.kill()
        if ends:
            # the end of the rank closes the pipe: it still has its own end of the other, on which it waits
            assert launcher.stdout.read() == ""
        launcher.stdin.close()
        assert launcher.stdout.read() == ("" if ends else "went on\n")


@pytest.mark.parametrize(
    ("launcher", "processes"), [("zero_recipes.tools.main", 2), grid("accelerate.commands.launch", 1)]
)
def test_sigkill_of_the_launcher_ends_its_ranks_and_the_same_command_goes_on(request, tmp_path, launcher, processes):
    recipe = resume_recipe(tmp_path, save_steps=2, max_steps=2000)
    out = tmp_path / "out"
    place = [] if launcher.startswith("accelerate") else ["train", str(recipe)]
    command = [sys.executable, "-m", launcher, *place, "--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml")]
    command += ["--num_processes", str(processes)]
    if launcher.startswith("accelerate"):
        command += [str(ROOT / "run_sft.py"), str(recipe)]
    command += ["--output_dir", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as first:
        said = ""
        for line in first.stdout:
            said += line
            if (out / "checkpoint-2" / "manifest.json").is_file():
                break
        ranks = psutil.Process(first.pid).children(recursive=True)
        assert len(ranks) >= processes, said[-3000:]
        first.send_signal(signal.SIGKILL)
        first.stdout.read()  # to its end: no rank has the pipe any more
        first.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert checkpoint_fault(out / "checkpoint-2") is None
    assert json.loads((out / "metrics.json").read_text())["status"] == "running"
    last = max(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))
    argv = arguments(recipe, "ddp", out, "--max_steps", str(last + 2))
    rest = request.getfixturevalue({1: "one", 2: "two"}[processes]).run(cases.train, argv=argv)[0]["metrics"]
    assert rest["status"] == "ok" and rest["resumed_at"]
