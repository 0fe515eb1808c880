"""One rank of test_rendezvous.py: meets the others, or stops on the way and stays alive until its input ends."""

import json
import sys
from datetime import timedelta

import torch
from torch import distributed

from zero_recipes.core.findings import Refusal, print_refusal
from zero_recipes.core.process import leave
from zero_recipes.distributed import rendezvous

TIMEOUT = timedelta(seconds=1234)


def main(order: dict) -> int:
    if order.get("stops") == "before the all-reduce":  # joins, and never exchanges anything
        rendezvous._join("gloo", order["rank"], order["world_size"], 60)
        sys.stdin.read()
        return 0
    if order.get("reduces wrongly"):
        distributed.all_reduce = lambda tensor: None
    try:
        rendezvous.rendezvous("gloo", TIMEOUT, order.get("join_seconds", 60), order.get("exchange_seconds", 60))
    except Refusal as refusal:
        return print_refusal(refusal)
    group = distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    print("met", distributed.get_world_size(), flush=True)
    return 0


leave(main(json.loads(sys.argv[1])))
