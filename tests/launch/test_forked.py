"""A launch whose ranks are forked (zero_recipes/tools/rehearse/forked.py) beside a real one of the same command."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from tests.helpers.group import free_port
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, settings_with, write_recipe
from tests.launch.test_rehearse import in_each_call, own_model
from zero_recipes.checkpoint.save import checkpoint_fault
from zero_recipes.config.accelerate import ONE_MACHINE, environments_of_ranks
from zero_recipes.core.host import Host
from zero_recipes.core.process import RANK_0
from zero_recipes.tools.rehearse import forked, launches, phases
from zero_recipes.tools.rehearse.words import EVERY_LAUNCH

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]

# what torchrun's agent adds for itself, where the ranks meet, and who keeps the store
OF_THE_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"}


def rehearsal_of(folder: Path, strategy: str = "zero2", **keys) -> phases.Rehearsal:
    words = [*EVERY_LAUNCH.split(), "--eval_strategy", "no", "--warmup_steps", "0"]
    recipe = write_recipe(folder, **keys)
    return phases.Rehearsal(recipe, settings_with(), 2, words, Path(f"accelerate_configs/{strategy}.yaml"), 2, None)


def launched(rehearsal: phases.Rehearsal, out: Path, server: forked.ForkServer | None) -> phases.Ran:
    return launches.launched(rehearsal, out, out.name, Console(quiet=True), server)


@pytest.fixture(scope="module", autouse=True)
def in_root():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[forked.ForkServer]:
    """One for all tests of this file, as for all launches of a rehearsal. At last it is killed amid a launch."""
    folder = tmp_path_factory.mktemp("server")
    with launches.fork_server(rehearsal_of(folder), folder) as server:
        yield server
        child = start(server, folder, "import os, signal; print(os.getpid(), flush=True); signal.pause()")
        left = [psutil.Process(int(child.stdout.readline())) for _ in range(2)]
        psutil.Process(child.pid).kill()
        assert child.wait() == -signal.SIGKILL
        assert psutil.wait_procs(left, timeout=10)[1] == []


def start(
    server: forked.ForkServer, folder: Path, text: str, strategy: str = "zero2", count: int = 2
) -> forked.ForkedLaunch:
    """Forked ranks, of a script of this text."""
    script = folder / "script.py"
    script.write_text(text)
    file = Path(f"accelerate_configs/{strategy}.yaml")
    ranks = environments_of_ranks(file, count, free_port(), environment_of(folder))
    child = server.start([str(script), "a word"], ranks, [], {})
    assert isinstance(child, forked.ForkedLaunch)
    assert child.stdout.readline() == forked.SAID.decode()
    return child


def environment_of(folder: Path) -> dict[str, str]:
    threads = str(Host().threads(2))
    return os.environ | {"HERE": str(folder), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}


def ended(child: forked.ForkedLaunch) -> tuple[int, str]:
    """(exit code, what the ranks have printed)."""
    log = child.stdout.read()
    return child.wait(), log


# what a rank finds


SHOWS = """
import json, numpy, os, random, sys, threading, torch
from zero_recipes.core.process import age
found = {"environment": dict(os.environ), "argv": sys.argv, "name": __name__, "path": sys.path[0]}
found |= {"main": sys.modules["__main__"].__file__, "leads": os.getsid(0) == os.getpid(), "folder": os.getcwd()}
found |= {"threads": [torch.get_num_threads(), threading.active_count()], "file": __file__}
found |= {"terminals": [stream.isatty() for stream in (sys.stdout, sys.stderr)], "cuda": torch.cuda.is_initialized()}
found["drawn"] = [random.random(), numpy.random.rand(), torch.rand(1).item()]
with open(f"{os.environ['HERE']}/{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize(
    "strategy, count", [grid("zero2", 2), grid("zero3", 1), grid("ddp", 2), grid("ddp", 1), grid("fsdp2", 2)]
)
def test_a_forked_rank_finds_what_a_launched_one_does(tmp_path, server, strategy, count):
    folders = [tmp_path / "launched", tmp_path / "forked"]
    for folder in folders:
        folder.mkdir()
    code, log = ended(start(server, folders[1], SHOWS, strategy, count))
    assert code == 0, log
    shutil.copy(folders[1] / "script.py", folders[0])
    words = [sys.executable, "-m", "accelerate.commands.launch", *ONE_MACHINE, "--main_process_port", "0"]
    words += ["--config_file", f"accelerate_configs/{strategy}.yaml", "--num_processes", str(count)]
    words += [str(folders[0] / "script.py"), "a word"]
    real = subprocess.run(words, env=environment_of(folders[0]), capture_output=True, text=True, timeout=300)
    assert real.returncode == 0, real.stderr

    drawn = []
    for rank in range(count):
        found = []
        for folder in folders:
            text = (folder / f"{rank}.json").read_text()
            found.append(json.loads(text.replace(str(folder), "FOLDER")))
        paths = [one.pop("path") for one in found]
        assert paths == ["FOLDER", str(ROOT)]  # of the script; the server has run_sft.py's
        drawn += [number for one in found for number in one.pop("drawn")]
        theirs, mine = (one.pop("environment") for one in found)
        mine.pop(RANK_0, None)
        assert found[0] == found[1]
        assert {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)} <= OF_THE_AGENT
    assert len(set(drawn)) == len(drawn), "unseeded numbers are each process's own"


# its end


def test_exit_handlers_run_and_what_is_printed_arrives(tmp_path, server):
    text = "import atexit, sys\natexit.register(print, 'the end')\nprint('out')\nprint('err', file=sys.stderr)\n"
    code, log = ended(start(server, tmp_path, text))
    assert code == 0 and sorted(log.split("\n")) == ["", *["err"] * 2, *["out"] * 2, *["the end"] * 2]


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("sys.exit(2)", 1, "rank 1 ended with exit code 2"),
        ("os.kill(os.getpid(), 9)", -9, "rank 1 ended with exit code -9"),
    ],
)
def test_a_rank_that_fails_ends_the_others(tmp_path, server, end, code, said):
    text = f"import os, signal, sys\nif os.environ['RANK'] == '0':\n    signal.pause()\n{end}\n"
    found, log = ended(start(server, tmp_path, text))
    assert found == code and said in log


def test_a_rank_that_fails_waits_for_the_words_of_rank_0(tmp_path, server):
    """And not for itself: /proc shows each fork with the variables of its parent."""
    text = """
import os, sys
from zero_recipes.core.process import wait_for_rank_0
if os.environ["RANK"] == "0":
    with open(os.environ["HERE"] + "/asked") as asked:
        asked.read()
    print("rank 0 has said why", flush=True)
    sys.exit(0)
open(os.environ["HERE"] + "/asked", "w").close()
wait_for_rank_0(1e6)
print("it has ended", flush=True)
sys.exit(2)
"""
    os.mkfifo(tmp_path / "asked")
    code, log = ended(start(server, tmp_path, text))
    assert (code, log) == (1, "rank 0 has said why\nit has ended\nrank 1 ended with exit code 2\n")


def test_a_server_that_cannot_import_is_done_without(tmp_path):
    command = [sys.executable, "-c", "print('launched as it is')"]
    with forked.ForkServer(["run_sft.py", str(tmp_path / "none.yaml")], dict(os.environ)) as server:
        child = server.start(["run_sft.py"], [{}], command, dict(os.environ))
        assert isinstance(child, subprocess.Popen) and child.communicate()[0] == "launched as it is\n"


@pytest.mark.parametrize("device, threads, can", [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)])
def test_nothing_is_forked_from_threads_or_without_cuda_in_forks(monkeypatch, device, threads, can):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a fork may have it")
    monkeypatch.setattr(sys, "argv", ["server.py", "0", str(ROOT / "run_sft.py")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    server = runpy.run_path(str(forked.SERVER), run_name="server")
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    assert server["can_fork"](device) == can


# whole runs


def logged(folder: Path) -> str:
    """Without numbers that differ between any two runs."""
    text = (folder / "log.txt").read_text().replace(str(folder), "FOLDER")
    return re.sub(r"[\d,]+ tokens/s|peak memory \S+ \w+|[\d.]+ \w+ left|(\w+_per_second|\w*runtime)\W+[\d.]+", "", text)


def test_a_forked_run_is_the_launched_one_bit_for_bit(tmp_path, server):
    rehearsal = rehearsal_of(tmp_path)
    ran = {}
    for kind, forks in (("launched", None), ("forked", server)):
        ran[kind] = launched(rehearsal, tmp_path / kind / "whole", forks)
        assert ran[kind].is_over, (ran[kind].folder / "log.txt").read_text()[-3000:]
    assert phases.outcome(ran["forked"]) == phases.outcome(ran["launched"])
    fields = [set(one.metrics.model_dump(exclude_none=True)) for one in ran.values()]
    assert fields[0] == fields[1] and len(ran["forked"].metrics.loss_history) == 3
    assert ran["forked"].metrics.phase_seconds["startup"] < ran["launched"].metrics.phase_seconds["startup"]
    theirs = logged(ran["launched"].folder)
    own = [line for line in logged(ran["forked"].folder).splitlines() if line not in theirs]
    assert own == [forked.SAID.decode().strip()]


def refused(folder: Path) -> dict:
    return {"lr_scheduler_type": "no_such"}


def on_rank_1(statement: str) -> str:
    """Of its second step."""
    return f"import os\n            if self.calls == 2 and os.environ['RANK'] == '1':\n                {statement}"


def fails(folder: Path) -> dict:
    return own_model(folder, in_each_call(on_rank_1("raise KeyError('mine')")))


def dies(folder: Path) -> dict:
    return own_model(folder, in_each_call(on_rank_1("os.kill(os.getpid(), 9)")))


@pytest.mark.parametrize(
    "plant, status, words, also_launched",
    [
        (refused, "refused", "no_such", False),
        (fails, "failed", "KeyError: 'mine'", False),
        (dies, "failed", "a process was killed by SIGKILL", False),
        grid(refused, "refused", "no_such", True),
        grid(fails, "failed", "KeyError: 'mine'", True),
        grid(dies, "failed", "a process was killed by SIGKILL", True),
    ],
)
def test_a_forked_run_fails_as_the_launched_one(tmp_path, server, plant, status, words, also_launched):
    rehearsal = rehearsal_of(tmp_path, **plant(tmp_path))
    kinds = {"forked": server} | ({"launched": None} if also_launched else {})
    rows = {}
    for kind, forks in kinds.items():
        ran = launched(rehearsal, tmp_path / kind / "whole", forks)
        log = (ran.folder / "log.txt").read_text()
        row = ran.metrics
        assert row.status == status and words in row.error, log[-3000:]
        assert words in log or plant is dies
        rows[kind] = (row.error, row.failure.code, row.failure.phase, row.failure.rank, row.failure.signal)
        shutil.rmtree(ran.folder)
    assert len(set(rows.values())) == 1


def test_a_killed_run_leaves_its_checkpoint_and_no_process(tmp_path, server):
    rehearsal = rehearsal_of(tmp_path)
    ran = launched(rehearsal, tmp_path / "killed", server)
    assert ran.is_over and ran.metrics.status == "running"
    assert checkpoint_fault(ran.folder / phases.FIRST) is None and not (ran.folder / phases.LAST).exists()
    assert psutil.Process(server.process.pid).children(recursive=True) == []
    assert not list(ran.folder.glob("failure.*")), "a rank has seen another's end"
