"""The processes of one tests/helpers/group.py: the libraries are imported once, then this process forks for each rank.

Its argument, in JSON: [world size, port of the store, folder of the logs, each rank's descriptor of its connection].
"""

import functools
import gc
import importlib
import json
import os
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from zero_recipes.compat.warnings import quieten

quieten()
import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import numa  # noqa: E402

import tests.helpers.cases  # noqa: E402, F401 (imported once, for all ranks)
from tests.helpers.forget import forget_last_run  # noqa: E402
from zero_recipes.distributed import once_per_node  # noqa: E402


def main(world_size: int, port: int, folder: str, descriptors: list[int]) -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    gc.freeze()  # what is imported stays: collecting after a case need not go through it, which takes half a second
    for rank in range(world_size):
        if os.fork() == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            be_rank(rank, Path(folder), descriptors)
            return
    close(descriptors)
    for _ in range(world_size):
        os.wait()


def be_rank(rank: int, folder: Path, descriptors: list[int]) -> None:
    """Run the cases that come, and answer each, until the group closes the connection."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    group = Connection(descriptors.pop(rank))
    close(descriptors)  # the group learns of a rank's end where nobody else holds its connection
    os.set_inheritable(group.fileno(), False)
    torch.set_num_threads(1)
    # stage 3 asks at every bucket, and each time starts a process: a fifth of a tiny model's backward pass
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    once_per_node.POLL_SECONDS = 0.01  # rank 0 prepares a test's rows in a moment, and the others wait for it
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    environment = dict(os.environ)
    with suppress(EOFError):
        while True:
            order = json.loads(group.recv())
            os.environ.clear()  # accelerate leaves the last run's plugins there
            os.environ.update(environment)
            group.send(json.dumps([order.pop("number"), run(**order)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(case: str, arguments: dict) -> dict:
    print(f"=== case {case} {arguments}", flush=True)
    forget_last_run()
    try:
        module, _, name = case.rpartition(".")
        cases = importlib.import_module(f"tests.helpers.{module or 'cases'}")
        return {"value": getattr(cases, name)(**arguments)}
    except BaseException:
        return {"traceback": traceback.format_exc()}
    finally:
        gc.collect()


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
