"""Bytes that one optimizer step sends through each collective, as sizes of the full, unsharded tensors."""

import functools
import os
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 - torch has no public place for it

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import local_world_size
from zero_recipes.engine.deepspeed import COLLECTIVES, communication_backend

Bytes = Counter[str]  # by collective
# {operator: (collective, which argument is the full tensor)}: torch 2.13, csrc/distributed/c10d/Ops.cpp, Functional.cpp
OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", 0),  # output, input
    "c10d::allgather_": ("all_gather", 0),  # output lists, inputs
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),  # output, input
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),  # input, ranks
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
}


def _size(tensors) -> int:
    """Bytes of a tensor, or of all in (lists of) lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


class CountCollectives(TorchDispatchMode):
    """Adds up bytes of the full tensors while it is in force; autograd's threads are counted too.

    Private: TorchDispatchMode and the names of torch's operators of collectives (torch 2.13, utils/_python_dispatch.py
    and OPERATORS). CommDebugMode, which is public, counts calls and no bytes.
    """

    def __init__(self):
        super().__init__()
        self.bytes: Bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own collectives come by below, on plain tensors
        if func.name() in OPERATORS:
            collective, full = OPERATORS[func.name()]
            size = _size(args[full])
            if func.name() == "_c10d_functional::all_gather_into_tensor":
                size *= args[1]
            self.bytes[collective] += size
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """Bytes that one optimizer step has sent, by collective."""

    everywhere: Bytes
    between_nodes: Bytes  # the part of it that went between machines


class CommunicationCounter:
    """Counts the bytes that each optimizer step sends.

    DeepSpeed's at its backend, DDP's by its gradients, FSDP2's as they pass.
    """

    def __init__(self, engine: torch.nn.Module, strategy: Strategy):
        """`engine`: what wraps the model; of DDP and DeepSpeed the model itself will do."""
        self.engine = engine
        self.strategy = strategy
        self.per_node = local_world_size(os.environ, strategy.world_size)
        self.steps: list[Step] = []
        self.now = Step(Counter(), Counter())
        self.passing = CountCollectives() if isinstance(engine, FSDPModule) else None

    def start(self) -> None:
        """Begin to count: DeepSpeed's methods are replaced, FSDP2's operators watched."""
        if self.strategy.is_deepspeed:
            backend = communication_backend()
            for name in COLLECTIVES:
                setattr(backend, name, self._counting(name, getattr(backend, name)))
        elif self.passing is not None:
            self.passing.__enter__()  # no `with` block can span what is counted

    def begin_step(self) -> None:
        """Begin a step: what an evaluation or a save has sent since the last one counts in none."""
        self.now = Step(Counter(), Counter())
        if self.passing is not None:
            self.passing.bytes.clear()

    def end_step(self) -> None:
        """Keep what was sent since `begin_step` as one step's."""
        everyone = list(range(self.strategy.world_size))
        if self.passing is not None:
            for collective, size in self.passing.bytes.items():
                self._add(collective, size, everyone)
        elif not self.strategy.is_deepspeed and self.strategy.world_size > 1:
            # the buckets of DistributedDataParallel hold each gradient once
            trained = [p for p in self.engine.parameters() if p.requires_grad]
            self._add("all_reduce", _size(trained), everyone)
        self.steps.append(self.now)
        self.begin_step()

    def stop(self) -> None:
        """End what `start` began. The counted steps stay."""
        if self.strategy.is_deepspeed:
            backend = communication_backend()
            for name in COLLECTIVES:
                vars(backend).pop(name, None)  # the class's own method shows again
        elif self.passing is not None:
            self.passing.__exit__(None, None, None)

    def median(self) -> dict[str, int]:
        """{collective: bytes per optimizer step}, the median over the counted steps but the first of several.

        Stage 3 has no trace of the modules' order in that one, and gathers what it keeps later.
        """
        return _median([step.everywhere for step in self._settled()])

    def median_between_nodes(self) -> dict[str, int]:
        """The part of `median` whose groups span machines: for one machine, the bytes that it receives."""
        return _median([step.between_nodes for step in self._settled()])

    def _settled(self) -> list[Step]:
        return self.steps[1:] or self.steps

    def _counting(self, name: str, method: Callable) -> Callable:
        collective, whole, names = COLLECTIVES[name]

        @functools.wraps(method)
        def counted(*arguments, **keywords):
            given = dict(zip(names, arguments, strict=False)) | keywords
            group = given.get("group") or torch.distributed.group.WORLD
            self._add(collective, _size(given[whole]), torch.distributed.get_process_group_ranks(group))
            return method(*arguments, **keywords)

        return counted

    def _add(self, collective: str, size: int, ranks: list[int]) -> None:
        if len(ranks) > 1:
            self.now.everywhere[collective] += size
        nodes = {rank // self.per_node for rank in ranks}
        if len(nodes) > 1:
            if collective == "all_to_all":
                # its inputs are parts: those of the machine's other processes belong to the same whole
                size *= self.per_node * len(nodes) // len(ranks)
            self.now.between_nodes[collective] += size


def _median(steps: list[Bytes]) -> dict[str, int]:
    medians = {}
    for name in sorted(set().union(*steps)):
        size = int(statistics.median(step[name] for step in steps))
        if size:
            medians[name] = size
    return medians
