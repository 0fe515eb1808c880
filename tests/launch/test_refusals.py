"""Real processes: a refused run exits with 2 on every rank, with one message, and writes nothing; all end cleanly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.two_ranks import two_ranks

BIN = Path(sys.executable).parent


def test_every_rank_exits_2_and_rank_0_alone_speaks(tmp_path):
    """Of the data, once the process group is started."""
    rows = tmp_path / "wrong"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"first": "a", "second": "b"}\n')
    argv = [str(write_recipe(tmp_path)), "--dataset_name", str(rows), "--output_dir", str(tmp_path / "out")]
    ranks = two_ranks(argv, tmp_path)
    assert [rank.returncode for rank in ranks] == [2, 2]
    message = ranks[0].stderr[ranks[0].stderr.index("refused: ") :]
    assert "[ZR508]" in message and "    why: " in message and "   fix: " in message
    assert len(message.strip().splitlines()) == 3, message
    for rank in ranks:
        assert "Traceback" not in rank.stderr and "Loading weights" not in rank.stderr
    assert "refused" not in ranks[1].stderr + ranks[1].stdout
    assert not (tmp_path / "out").exists(), "something was written before the refusal"
    closing = json.loads((tmp_path / "error1.json").read_text())
    assert "[ZR508]" in closing["message"]["extraInfo"]["py_callstack"]


SPEAKING = """
import os, sys
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.core.run_end import print_ending

if os.environ["RANK"] == "0":
    sys.stdin.read()  # slower than rank 1, until the test lets go
code = print_ending(Refusal([Finding("ZR000", "what", "why", "fix")]))
print("left", flush=True)
sys.exit(code)
"""


def test_a_silent_rank_leaves_after_rank_0_has_spoken():
    """A launcher ends all ranks when the first ends: were it a silent one, nobody would hear why."""
    ranks = []
    for rank in ("0", "1"):
        environment = os.environ | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([sys.executable, "-c", SPEAKING], env=environment, text=True, **pipes))
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(2)
    assert "refused: what" in ranks[0].communicate(timeout=60)[1]
    out, err = ranks[1].communicate(timeout=60)
    assert (out, err, ranks[0].returncode, ranks[1].returncode) == ("left\n", "", 2, 2)


# threads of a gloo group that outlive Python abort some runs with exit code -6


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
