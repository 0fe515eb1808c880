"""Before the process group: stale build locks go, live ones stay; processes and GPUs fit."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from torch.utils.file_baton import FileBaton

from zero_recipes.config.recipe import refuse_uneven_gpus
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Host
from zero_recipes.distributed.kernels import build, is_compiled, remove_stale_locks


def test_a_stale_build_lock_is_removed_and_one_that_is_held_stays(tmp_path, monkeypatch, capsys):
    """A stale lock hangs every later launch silently; who made one holds the file open (torch/utils/file_baton.py)."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("stale", "held"):
        (tmp_path / name).mkdir()
    (tmp_path / "stale" / "lock").write_text("")
    baton = FileBaton(str(tmp_path / "held" / "lock"))
    assert baton.try_acquire()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        remove_stale_locks()
        assert (tmp_path / "stale" / "lock").exists(), "another user may be compiling"
    remove_stale_locks()
    assert not (tmp_path / "stale" / "lock").exists() and "stale" in capsys.readouterr().out
    assert (tmp_path / "held" / "lock").exists()
    monkeypatch.setitem(ALL_OPS, "held", SimpleNamespace(load=lambda verbose: baton.release()))
    build(["held"])
    assert f"waiting for process {os.getpid()}" in capsys.readouterr().err


def test_a_kernel_of_another_installation_or_of_a_killed_compiler_is_compiled_anew(tmp_path, monkeypatch):
    """ninja would compile it where it is loaded: minutes without a line, longer than the other ranks wait."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    rules, library = tmp_path / "cpu_adam" / "build.ninja", tmp_path / "cpu_adam" / "cpu_adam.so"
    rules.parent.mkdir()
    library.write_text("")
    for sources, built_after, compiled in (
        (Path(deepspeed.__file__).parent, 1, True),
        (Path(deepspeed.__file__).parent, -1, False),
        (f"/elsewhere{Path(deepspeed.__file__).parent}", 1, False),
    ):
        rules.write_text(f"build cpu_adam.o: compile {sources}/ops/csrc/adam/cpu_adam.cpp\n")
        os.utime(library, (time := rules.stat().st_mtime + built_after, time))
        assert is_compiled("cpu_adam", Host()) == compiled
    rules.unlink()
    assert not is_compiled("cpu_adam", Host())


@pytest.mark.parametrize(
    ("processes", "device", "environment", "said"),
    [
        (4, "cuda", {}, r"4 processes .* 2 GPUs .ZR309"),
        (4, "cuda", {"LOCAL_WORLD_SIZE": "2"}, None),  # two machines
        (4, "cuda", {"LOCAL_SIZE": "2"}, None),  # by the deepspeed launcher, which sets no LOCAL_WORLD_SIZE
        (4, "cpu", {}, None),
        (1, "cuda", {}, r"2 GPUs .*ZR308"),
        (1, "cuda", {"RANK": "0"}, None),
    ],
)
def test_processes_and_gpus_fit(monkeypatch, processes, device, environment, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=said) if said else contextlib.nullcontext():
        refuse_uneven_gpus(SimpleNamespace(world_size=processes), device, environment)
