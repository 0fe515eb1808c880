"""Runs end cleanly, every time: threads of a gloo group that outlive Python abort some runs with exit code -6."""

import subprocess
import sys

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.cli.sweep import launch_of_strategy

HANG_SECONDS = 120  # a guard only
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


def test_a_run_leaves_without_taking_the_interpreter_down():
    """By its end an object of the main module would be finalised."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "last wordsthread joined\nexit handler\n"


IDLE_WORKER = """
import threading
from zero_recipes.core import process

process.END_SECONDS = 0.2
threading.Thread(target=threading.Event().wait).start()
print("last words", end="")
process.leave(3)
"""


def test_a_thread_that_never_ends_is_not_waited_for_for_ever():
    """torch.compile leaves such workers; the interpreter would join them."""
    command = [sys.executable, "-c", IDLE_WORKER]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "last words", "")


@pytest.mark.grid
def test_20_of_20_runs_exit_0(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=2)
    codes = []
    for number in range(20):
        config = ROOT / "accelerate_configs" / f"{STRATEGIES[number % len(STRATEGIES)]}.yaml"
        command = launch_of_strategy(recipe, config, 2, tmp_path / str(number), [], ROOT / "run_sft.py")
        codes.append(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode)
    assert codes == [0] * 20
