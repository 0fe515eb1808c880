"""The processes meet: a process group, and one small all-reduce that proves it before any weight is loaded.

Without the proof a wrong interface or a closed port shows after minutes of loading, as a hang of `ddp_timeout` seconds
(half an hour by default) that names nobody.

By hand on torch's store, for torch 2.13 names the missing to rank 0 alone: its store barrier with rank tracing
(elastic/utils/store.py) ten seconds late, and monitored_barrier over gloo only, in a group that must stand already.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta

import psutil
import torch
from torch import distributed
from torch.distributed.elastic.utils.store import barrier

from zero_recipes.core.findings import Refusal, first_line, print_refusal, refusal

# torchrun itself gives machines 600 s to join (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py,
# `_DEFAULT_TIMEOUTS`): imports from a cold network disk take minutes, and no import is left once all have come
JOIN_SECONDS = 600
EXCHANGE_SECONDS = 60
ACK_SECONDS = 10
APART = "cannot exchange data with the others"


def rendezvous(
    backend: str,
    timeout: timedelta,
    join_seconds: float = JOIN_SECONDS,
    exchange_seconds: float = EXCHANGE_SECONDS,
) -> None:
    """Start the default process group and all-reduce one number in it. `timeout`: of the training's collectives.

    The environment holds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises Refusal on each rank that knows of a
    failure; one that is blocked in NCCL or gloo, where no exception reaches it, prints it and leaves with exit code 2.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _join(backend, rank, world_size, join_seconds)
    store.set_timeout(timeout)  # as init_process_group does with a store of its own
    arguments = (store.clone(), backend, rank, world_size, exchange_seconds)
    watch = threading.Thread(target=_watch, args=arguments, daemon=True)
    watch.start()
    try:
        store.set(_key("exchanging", rank), "yes")
        distributed.init_process_group(
            backend,
            store=distributed.PrefixStore("training", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        total = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
        distributed.all_reduce(total)
        if total.item() != world_size:
            raise RuntimeError(f"the all-reduce of ones gave {total.item():g} instead of {world_size}")
    except RuntimeError as error:
        cause = f"rank {rank} on {socket.gethostname()}: {first_line(error).rstrip('.')}"
        with contextlib.suppress(RuntimeError):  # the store may be what is gone
            for other in range(world_size):
                store.set(_key("status", other), cause)
            watch.join()
        raise _refusal(backend, APART, cause) from error
    store.set(_key("status", rank), "")
    watch.join()


def _join(backend: str, rank: int, world_size: int, seconds: float) -> distributed.Store:
    """The store at MASTER_ADDR:MASTER_PORT, once every rank has joined.

    Made as torch does (distributed/rendezvous.py `_create_c10d_store`: torchrun's agent keeps it, else rank 0), but
    without its wait for all, which counts those who have joined and does not know who is missing.
    """
    limit = timedelta(seconds=seconds)
    what = f"waited {seconds:g} s in vain for all {world_size} to come"
    kept_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not kept_by_agent,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=limit,
        )
        store.set(_key("joined", rank), socket.gethostname())
    except RuntimeError as error:  # torch's DistError is one
        raise _refusal(
            backend, f"cannot reach the meeting point within {seconds:g} s", first_line(error).rstrip(".")
        ) from error
    try:
        store.wait([_key("joined", other) for other in range(world_size)], limit)
        return store
    except distributed.DistNetworkError as error:
        raise _refusal(backend, what, f"the store is gone: {first_line(error).rstrip('.')}") from error
    except RuntimeError as error:
        raise _refusal(backend, what, f"{_without(store, world_size, 'joined')} not come") from error


def _watch(store: distributed.Store, backend: str, rank: int, world_size: int, seconds: float) -> None:
    """End this process when another rank reports a failure, or nothing is heard in time. Runs beside the all-reduce.

    At once and without an interpreter's end: the main thread is blocked in gloo or NCCL and hears no exception.
    """
    what = APART
    try:
        try:
            store.wait([_key("status", rank)], timedelta(seconds=seconds))
            cause = store.get(_key("status", rank)).decode()
            _leave_together(store, world_size)
            if not cause or cause.startswith(f"rank {rank} on "):
                return  # it went well, or the main thread refuses
        except distributed.DistStoreError:
            what = f"could not all-reduce one number in {seconds:g} s"
            missing = _without(store, world_size, "exchanging")
            cause = f"{missing} not come to it" if missing else "All have come to it, and no data has"
    except RuntimeError as error:
        cause = f"the store is gone: {first_line(error).rstrip('.')}"
    os._exit(print_refusal(_refusal(backend, what, cause)))


def _leave_together(store: distributed.Store, world_size: int) -> None:
    """Rank 0 keeps the store: it stays until each rank has read its status, lest its own end be taken for theirs."""
    with contextlib.suppress(RuntimeError):  # one that died reads nothing; training's first collective names it
        barrier(store, world_size, "zero_recipes/acked", ACK_SECONDS)


def _key(what: str, rank: int) -> str:
    return f"zero_recipes/{what}/{rank}"


def _without(store: distributed.Store, world_size: int, what: str) -> str:
    """ "rank 3 on gpu-b has", "ranks 3, 5 have": those that have not set this key; "" if all have."""
    absent = [rank for rank in range(world_size) if not store.check([_key(what, rank)])]
    named = [
        f"{rank} on {store.get(_key('joined', rank)).decode()}" if store.check([_key("joined", rank)]) else str(rank)
        for rank in absent
    ]
    if not named:
        return ""
    more = " ..." if len(named) > 8 else ""
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named[:8])}{more} {'have' if len(named) > 1 else 'has'}"


def _refusal(backend: str, what: str, cause: str) -> Refusal:
    variable = _variable(backend)
    here = ", ".join(f"{name} {address}" for name, address in _addresses().items())
    return refusal(
        "ZR324",
        rank=os.environ["RANK"],
        world_size=os.environ["WORLD_SIZE"],
        gethostname=socket.gethostname(),
        what=what,
        cause=cause,
        interface=interface(backend),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=os.environ["MASTER_PORT"],
        variable=variable,
        here=here,
        fix="; NCCL_DEBUG=INFO tells more." if backend == "nccl" else ".",
        scope="rank",
    )


def interface(backend: str) -> str:
    """The network interface that this rank's traffic takes: the one requested, or that of the route to MASTER_ADDR."""
    variable = _variable(backend)
    if variable in os.environ:
        return f"{os.environ[variable]} ({variable})"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
            address = probe.getsockname()[0]
    except OSError as error:
        return f"none found, no route to MASTER_ADDR ({error})"
    name = next((name for name, known in _addresses().items() if known == address), "unknown")
    return f"{name} {address} (the route to MASTER_ADDR; {variable} is not set)"


def _variable(backend: str) -> str:
    return "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"


def _addresses() -> dict[str, str]:
    """{interface: its IPv4 address}."""
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
