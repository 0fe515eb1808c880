"""The processes of a run: they join, share what one of them did or failed of, and leave together."""

import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.utils.store import barrier

from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal, first_line, refusal
from zero_recipes.core.process import rank
from zero_recipes.core.run_end import PeerFailed, RunFailed, print_ending
from zero_recipes.engine.faults.ddp_of_one_process import forget_local_rank
from zero_recipes.engine.faults.deepspeed_group_on_cpu import start_deepspeed_group
from zero_recipes.engine.kernels import COMPILE_SECONDS, build, missing, ops_of, remove_stale_locks
from zero_recipes.engine.speed.host_threads import set_host_threads

# as torchrun gives machines (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, `_DEFAULT_TIMEOUTS`):
# imports from a cold network disk take minutes
JOIN_SECONDS = 600.0
EXCHANGE_SECONDS = 60.0
READ_SECONDS = 10.0
FOREVER = timedelta(days=20)  # torch counts milliseconds in 32 bits
JOINED = "zero_recipes/joined"
_calls = itertools.count()  # every process counts the same calls


@contextlib.contextmanager
def process_group(run: Run) -> Iterator[None]:
    """Start the run's process group, and leave it where the run is refused or fails.

    A run that went well ends it itself (Trainer.end).
    One that is refused ends gloo's: else its exit can abort other ranks (exit code -6).
    It leaves NCCL's, which would wait for ranks in a collective (pytorch/torchtitan#1342).
    The launcher of one that fails ends the other ranks.
    """
    ops = ops_of(run.strategy, run.device, run.settings)
    start_process_group(run.strategy, run.device, run.settings.ddp_timeout, ops)
    set_host_threads(run.strategy, run.device)
    try:
        yield
    except (Refusal, RunFailed):
        if distributed.is_initialized() and run.device == "cpu":
            distributed.destroy_process_group()
        raise


def start_process_group(strategy: Strategy, device: str, timeout_seconds: int, ops: set[str]) -> None:
    """Start the process group before TrainingArguments does, and prove it. Raises Refusal.

    `ops`: kernels.ops_of; missing ones are compiled first.
    """
    if strategy.world_size == 1 and not strategy.is_deepspeed:
        if not strategy.is_fsdp:
            forget_local_rank()
        return
    # DeepSpeed compiles with ninja, beside the interpreter: a venv need not be activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if "RANK" not in os.environ:  # plain python with DeepSpeed: a world of one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo"
    if device == "cuda":
        # as accelerate's for FSDP (state.py): gloo reduces what is offloaded
        backend = "cuda:nccl,cpu:gloo" if strategy.is_fsdp else "nccl"
    to_compile = missing(ops, device)
    if int(os.environ["LOCAL_RANK"]) == 0:
        remove_stale_locks()
        build(to_compile)
    rendezvous(backend, timeout, JOIN_SECONDS + COMPILE_SECONDS * len(to_compile))
    if strategy.is_deepspeed:
        start_deepspeed_group(backend, timeout)


def rendezvous(
    backend: str, timeout: timedelta, join_seconds: float = JOIN_SECONDS, exchange_seconds: float = EXCHANGE_SECONDS
) -> None:
    """Start the default process group and all-reduce one number in it.

    `timeout`: of the training's collectives.
    The environment holds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    Without the proof a wrong interface or a closed port shows after minutes, as a hang that names nobody.
    Raises Refusal. No exception reaches a rank that waits in NCCL or gloo: it prints the refusal and exits with 2.
    """
    number = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    # as torch (distributed/rendezvous.py `_create_c10d_store`): torchrun's agent keeps the store, else rank 0
    keeps = number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    waited = partial(_apart, backend, f"waited {join_seconds:g} s for {world_size} ranks")
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = _join(address, port, keeps, number, world_size, join_seconds, waited)
    store.set_timeout(timeout)  # as init_process_group does with its own
    what = "cannot exchange data with the other ranks"
    silent = _apart(backend, what, f"one number was not all-reduced within {exchange_seconds:g} s")
    timer = threading.Timer(exchange_seconds, lambda: os._exit(print_ending(silent)))
    timer.daemon = True
    timer.start()
    try:
        trainings = distributed.PrefixStore("training", store)
        distributed.init_process_group(backend, timeout=timeout, store=trainings, rank=number, world_size=world_size)
        total = torch.ones(1, device="cuda" if "nccl" in backend else "cpu")
        distributed.all_reduce(total)
        if total.item() != world_size:
            raise RuntimeError(f"the all-reduce of ones gave {total.item():g} instead of {world_size}")
    except RuntimeError as error:
        raise _apart(backend, what, first_line(error)) from error
    finally:
        timer.cancel()


def _join(
    address: str, port: int, keeps: bool, number: int, members: int, seconds: float, refused: Callable[[str], Refusal]
) -> distributed.TCPStore:
    """The store at that address, once all members have joined. Raises what `refused` makes of who is missing.

    torch's own wait only counts: it does not know who is missing.
    """
    limit = timedelta(seconds=seconds)
    keys = [f"{JOINED}/{other}" for other in range(members)]
    try:
        store = distributed.TCPStore(
            address, port, is_master=keeps, wait_for_workers=False, multi_tenant=True, timeout=limit
        )
        store.set(f"{JOINED}/{number}", "")
        store.wait(keys, limit)
        return store
    except distributed.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        named = ", ".join(missing[:8])
        if len(missing) > 8:
            named += f" and {len(missing) - 8} more"
        raise refused(f"missing: {named}") from error
    except RuntimeError as error:  # no such host, nobody listens, or it has ended
        raise refused(f"{address}:{port} cannot be reached: {first_line(error).rstrip('.')}") from error


def wait_for_hosts(hosts: list[str], machine_rank: int, port: int, seconds: float) -> None:
    """Wait until every machine has come, before any launcher starts. Raises Refusal.

    `hosts`: names or addresses, by machine rank. The first keeps the store.
    torchrun's static rendezvous, which `accelerate launch` uses, waits 600 s and then says "1/2 clients joined"
    (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py, next_rendezvous).
    No rank runs until then.
    """
    named = ", ".join(f"{other}: {host}" for other, host in enumerate(hosts))

    def refused(missing: str) -> Refusal:
        return refusal(
            "ZR327",
            missing=missing,
            machine_rank=machine_rank,
            seconds=seconds,
            hosts=named,
            first=hosts[0],
            port=port,
        )

    store = _join(hosts[0], port, machine_rank == 0, machine_rank, len(hosts), seconds, refused)
    _leave_together(store, len(hosts), "zero_recipes/hosts")


def _leave_together(store: distributed.Store, members: int, key: str) -> None:
    """The store ends with rank 0: it waits until others have read. One that died never does."""
    with contextlib.suppress(RuntimeError):
        barrier(store, members, f"{key}/read", READ_SECONDS)


def _apart(backend: str, what: str, cause: str) -> Refusal:
    variable = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    return refusal(
        "ZR324",
        rank=os.environ["RANK"],
        world_size=os.environ["WORLD_SIZE"],
        host=socket.gethostname(),
        what=what,
        cause=cause.rstrip("."),
        address=os.environ["MASTER_ADDR"],
        port=os.environ["MASTER_PORT"],
        variable=variable,
        interface=os.environ.get(variable, "not set"),
        scope="rank",
    )


# what one rank did or failed of, on all ranks


def agree(work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each rank. What the lowest rank failed of, all fail of. Collective."""
    world_size = 1
    if distributed.is_initialized():
        world_size = distributed.get_world_size()
    return _shared(work, range(world_size), "works with the others")


def once(work: Callable[[], Any], doing: str) -> Any:
    """Return what `work` returns on rank 0, which alone calls it. `doing`, in an error: "plans the run". Collective."""
    return _shared(work, [0], doing)[0]


def once_per_node(work: Callable[[], Any], doing: str) -> Any:
    """What `work` returns on each machine's first process, which alone calls it. `doing`: what it does, for others."""
    first_here = rank() - int(os.environ.get("LOCAL_RANK", 0))
    return _shared(work, [first_here], doing)[0]


@contextlib.contextmanager
def rank_0_writes() -> Iterator[None]:
    """Let all wait at its end for rank 0, however long it writes. Collective."""
    failure = None
    try:
        yield
    except Exception as error:
        if rank():
            raise
        failure = error

    def end() -> None:
        if failure is not None:
            raise failure

    _shared(end, [0], "saves")


def _shared(work: Callable[[], Any], workers: Sequence[int], doing: str) -> list[Any]:
    """What `work` returns on each of the workers. Collective.

    Raises on all what the first of them failed of: Refusal and RunFailed as they are, else a PeerFailed.
    Through the rendezvous store: a collective ends every rank after `ddp_timeout`,
    and tokenising or writing a large model may take longer (deepspeedai/DeepSpeed#7533).
    A rank that skipped a call would leave the others waiting: RuntimeError where two are in different calls.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [work()]
    me = rank()
    number = next(_calls)
    operation = _operation(work, doing)
    key = f"zero_recipes/shared/{number}"
    store = distributed.group.WORLD.get_group_store()
    value = own_error = None
    if me in workers:
        try:
            value = work()
        except Exception as error:
            own_error = error
    store.set(f"{key}/{me}", pickle.dumps((operation, value, _reported(own_error, doing))))
    values = []
    failures = {}
    for worker in workers:
        try:
            store.wait([f"{key}/{worker}"], FOREVER)
            their_operation, value, error = pickle.loads(store.get(f"{key}/{worker}"))
        except distributed.DistError as error:  # the store is in rank 0 or its launcher
            raise PeerFailed(f"rank 0 died, or rank {worker}, which {doing}, without a message") from error
        if their_operation != operation:
            _leave_together(store, distributed.get_world_size(), key)
            raise RuntimeError(f"call {number} is {operation} on rank {me}, and {their_operation} on rank {worker}")
        values.append(value)
        if error is not None:
            failures[worker] = error
    if failures:
        _leave_together(store, distributed.get_world_size(), key)
        first = min(failures)
        raise own_error if first == me else failures[first]
    return values


def _reported(error: Exception | None, doing: str) -> Exception | None:
    """What other ranks raise for it."""
    if error is None or isinstance(error, (Refusal, RunFailed)):
        return error
    return PeerFailed(f"rank {rank()}, which {doing}, failed: {type(error).__name__}: {error}")


def _operation(work: Callable[[], Any], doing: str) -> str:
    """The same on all ranks: "saves (rank_0_writes.<locals>.end)"."""
    function = work.func if isinstance(work, partial) else work
    return f"{doing} ({function.__qualname__})"


def gather_rows(own: torch.Tensor) -> torch.Tensor:
    """Gather all ranks' tensors of shape (1, n) as (world size, n), on their device. Collective.

    accelerate's call takes several times as long on the host, in every step.
    """
    if not distributed.is_initialized():
        return own
    everyone = own.new_empty(distributed.get_world_size(), own.shape[1])
    distributed.all_gather(list(everyone.split(1)), own)
    return everyone
