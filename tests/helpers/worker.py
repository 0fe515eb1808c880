"""A rank of tests/helpers/group.py: it runs the cases that come, and answers each."""

import ctypes
import functools
import gc
import json
import os
import pkgutil
import re
import signal
import traceback
import typing
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsspec import spec


def be_rank(rank: int, world_size: int, port: int, log: Path, environment: dict, group: Connection) -> None:
    """Run the cases that come, and answer each, until the group closes the connection."""
    os.setsid()  # what it starts is killed with it
    end_with_parent()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    enter(log, log, environment | {name: str(value) for name, value in numbers.items()})
    import deepspeed
    import torch
    from deepspeed.utils import numa

    os.set_inheritable(group.fileno(), False)  # the group learns of a rank's end where nobody else holds it
    torch.set_num_threads(1)
    if "ZERO_RECIPES_FILL" in os.environ:  # memory that nobody has set is NaN, which is slow
        torch.use_deterministic_algorithms(True, warn_only=True)
    # stage 3 asks at every bucket, and each time starts a process: a fifth of a tiny model's backward pass
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    kept = dict(os.environ)
    with suppress(EOFError):
        while True:
            order = json.loads(group.recv())
            os.environ.clear()  # accelerate leaves the last run's plugins there
            os.environ.update(kept)
            group.send(json.dumps([order.pop("number"), run(**order)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def end_with_parent() -> None:
    """SIGKILL once the fork server has ended, which ends with pytest: Ctrl-C does not reach this session."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def enter(out: Path, err: Path, environment: dict[str, str]) -> None:
    """Take over an environment, and write to these files, which may be one."""
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


def run(case: str, arguments: dict) -> dict:
    from tests.helpers.forget import forget_last_run

    print(f"=== case {case} {arguments}", flush=True)
    forget_last_run()
    try:
        return {"value": pkgutil.resolve_name(case)(**arguments)}
    except BaseException:
        return {"traceback": traceback.format_exc()}
    finally:
        end_engines()
        gc.collect()


def end_engines() -> None:
    """Their hooks hang on C++ nodes that Python does not collect, and hold the engines' buckets with them."""
    from deepspeed import DeepSpeedEngine

    for value in gc.get_objects():
        if type(value) is DeepSpeedEngine:
            value.destroy()


def remember() -> None:
    """What tiny runs work out again and again is kept for the rest of the process: a sixth of such a run.

    Installed packages' metadata, which each question for a version parses anew, and compiled patterns.

    And the types of a class's fields, which each parser of a recipe asks for.

    A package folder that a test makes has a path of its own. Of patterns Python keeps 512, and transformers' and
    datasets' are more than that; of each folder of rows datasets asks for some sixty names, several times a run.
    """
    parse = metadata.PathDistribution.metadata.fget
    parsed = functools.cache(lambda path: parse(metadata.PathDistribution(path)))
    metadata.PathDistribution.metadata = property(lambda self: parsed(self._path))
    typing.get_type_hints = _types_kept(typing.get_type_hints)
    spec.glob_translate = functools.cache(spec.glob_translate)
    re._MAXCACHE = 2**14


def _types_kept(get_type_hints: Callable[..., dict]) -> Callable[..., dict]:
    """The same, with the answer for a class kept."""
    of_class = functools.lru_cache(256)(get_type_hints)

    def types(of: Any, *arguments: Any, **keywords: Any) -> dict:
        if arguments or keywords or not isinstance(of, type):
            return get_type_hints(of, *arguments, **keywords)
        return dict(of_class(of))

    return types
