"""Several machines find each other before any launcher starts: who is missing is named, within a minute.

Launchers do not do that. torchrun's static rendezvous, which `accelerate launch` uses, waits 600 s before it starts a
rank and then says "1/2 clients joined" (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py, next_rendezvous;
a machine that waits for the first one says less): no code of the ranks can help, for none runs.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch import distributed
from torch.distributed.elastic.utils.store import synchronize

from zero_recipes.core.findings import first_line, refusal

PORT = 29501  # beside 29500, where the launchers' own store will stand a moment later
SECONDS = 60.0
JOINED = "zero_recipes/machine/"


def wait_for_hosts(hosts: list[str], machine_rank: int, port: int = PORT, seconds: float = SECONDS) -> list[str]:
    """Wait until every machine of `hosts` has come; their own names, by machine rank. Each machine calls it.

    `hosts`: names or addresses under which the machines reach each other, by machine rank; the first one keeps the
    store, at `port`. Raises Refusal, which names who is missing, after `seconds`.
    """
    limit, number = timedelta(seconds=seconds), len(hosts)
    if not 0 <= machine_rank < number:
        raise refusal("ZR325", machine_rank=machine_rank, number=number, hosts=", ".join(hosts), number_2=number - 1)
    me = f"machine {machine_rank} ({hosts[machine_rank]})"
    opening = limit if machine_rank else timedelta(seconds=SECONDS)  # one's own store is no question of the others
    try:
        store = distributed.TCPStore(
            hosts[0], port, is_master=machine_rank == 0, wait_for_workers=False, timeout=opening
        )
    except RuntimeError as error:  # torch's DistError is one
        raise refusal(
            "ZR326",
            what=f"machine 0 ({hosts[0]}) cannot be reached from {me} within {seconds:g} s"
            if machine_rank
            else f"{me} cannot open port {port}",
            error=first_line(error).rstrip("."),
            first_hosts=hosts[0],
            port=port,
        ) from error
    try:
        names = synchronize(store, socket.gethostname().encode(), machine_rank, number, JOINED, seconds)
    except distributed.DistNetworkError as error:
        raise refusal("ZR330", first_hosts=hosts[0], me=me, error=first_line(error).rstrip(".")) from error
    except RuntimeError as error:
        missing = [other for other in range(number) if not store.check([f"{JOINED}{other}"])]
        if not missing:  # one has ended before it read who is there: the launcher will say so
            return [store.get(f"{JOINED}{other}").decode() for other in range(number)]
        named = ", ".join(f"machine {other} ({hosts[other]})" for other in missing)
        raise refusal(
            "ZR327",
            named=named,
            what="has" if len(missing) == 1 else "have",
            me=me,
            seconds=seconds,
            number=number - len(missing),
            number_2=number,
            first_hosts=hosts[0],
            port=port,
        ) from error
    return [name.decode() for name in names]
