"""Runs end cleanly, every time: threads of a gloo group that outlive Python abort some runs with exit code -6."""

import subprocess
import sys

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.cli.sweep import launch_of_strategy

STRATEGIES = ("zero3", "zero0", "ddp", "zero2")


ENDING = """
import atexit, threading
from zero_recipes.core.process import leave

class Late:
    def __del__(self):
        print("the interpreter was taken down")

late = Late()
atexit.register(print, "exit handler")
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread joined"))).start()
threading.Timer(0.1, go.set).start()
print("last words", end="")
leave(3)
"""


IDLE_WORKER = """
import threading
from zero_recipes.core import process

process.END_SECONDS = 0.2
threading.Thread(target=threading.Event().wait).start()
print("last words", end="")
process.leave(3)
"""


@pytest.mark.parametrize(
    "program, printed", [(ENDING, "last wordsthread joined\nexit handler\n"), (IDLE_WORKER, "last words")]
)
def test_a_run_leaves_without_taking_the_interpreter_down_or_waiting_for_ever(program, printed):
    """By its end an object of the main module would be finalised. torch.compile leaves workers that never end."""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)  # a hang guard
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, "")


@pytest.mark.grid
def test_20_of_20_runs_exit_0(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=2)
    codes = []
    for number in range(20):
        config = ROOT / "accelerate_configs" / f"{STRATEGIES[number % len(STRATEGIES)]}.yaml"
        command = launch_of_strategy(recipe, config, 2, tmp_path / str(number), [], ROOT / "run_sft.py")
        codes.append(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode)
    assert codes == [0] * 20
