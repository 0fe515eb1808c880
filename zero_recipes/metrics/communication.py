"""Bytes that one optimizer step sends through each collective, as sizes of the full, unsharded tensors."""

import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import local_world_size
from zero_recipes.engine.deepspeed import COLLECTIVES, communication_backend


def _size(tensors) -> int:
    """Bytes of a tensor, or of all in (lists of) lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_size, tensors))


# operators (torch/csrc/distributed/c10d/Ops.cpp, Functional.cpp): the collective, the full tensor's bytes by arguments
_OPERATORS = {
    "c10d::_allgather_base_": ("all_gather", lambda args: _size(args[0])),  # output, input
    "c10d::allgather_": ("all_gather", lambda args: _size(args[0])),  # output lists, inputs
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda args: _size(args[1])),  # output, input
    "c10d::allreduce_": ("all_reduce", lambda args: _size(args[0])),
    "c10d::broadcast_": ("broadcast", lambda args: _size(args[0])),
    "c10d::alltoall_base_": ("all_to_all", lambda args: _size(args[1])),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda args: _size(args[0]) * args[1]),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda args: _size(args[0])),
    "_c10d_functional::all_reduce": ("all_reduce", lambda args: _size(args[0])),
    "_c10d_functional::all_reduce_": ("all_reduce", lambda args: _size(args[0])),
}


class CountCollectives(TorchDispatchMode):
    """Adds up, while it is in force, {collective: bytes of the full tensors}; autograd's threads are counted too.
    Private: TorchDispatchMode and the names of torch's operators of collectives (torch 2.13, utils/_python_dispatch.py
    and _OPERATORS above). CommDebugMode, which is public, counts calls and no bytes."""

    def __init__(self):
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own collectives come by below, on plain tensors
        known = _OPERATORS.get(func.name())
        if known is not None:
            collective, size = known
            self.bytes[collective] = self.bytes.get(collective, 0) + size(args)
        return func(*args, **(kwargs or {}))


Bytes = dict[str, int]


class CommunicationCounter:
    """Counts some steps of one run: DeepSpeed's at its backend, DDP's by its gradients, FSDP2's as they pass. Not by
    DeepSpeed's own logger (comm.py `timed_op`): that one waits for the device at every collective, and does not know
    which group it was, so that what stays inside a machine cannot be distinguished from what crosses the network."""

    def __init__(self, engine: torch.nn.Module, strategy: Strategy):
        """`engine`: what wraps the model; of DDP and DeepSpeed the model itself will do."""
        self.engine, self.strategy = engine, strategy
        self.per_node = local_world_size(os.environ, strategy.world_size)
        self.steps: list[tuple[Bytes, Bytes]] = []  # all of one step, and what of it went between machines
        self.now: tuple[Bytes, Bytes] = ({}, {})
        self.passing = CountCollectives() if isinstance(engine, FSDPModule) else None

    def start(self) -> None:
        if self.strategy.is_deepspeed:
            backend = communication_backend()
            for name in COLLECTIVES:
                setattr(backend, name, self._counting(name, getattr(backend, name)))
        elif self.passing is not None:
            self.passing.__enter__()  # no `with` block can span what is counted

    def end_step(self) -> None:
        """Close one optimizer step."""
        everyone = list(range(self.strategy.world_size))
        if self.passing is not None:
            for collective, size in self.passing.bytes.items():
                self._add(collective, size, everyone)
            self.passing.bytes = {}
        elif not self.strategy.is_deepspeed and self.strategy.world_size > 1:
            # the buckets of DistributedDataParallel hold each gradient once
            self._add("all_reduce", _size([p for p in self.engine.parameters() if p.requires_grad]), everyone)
        self.steps.append(self.now)
        self.now = ({}, {})

    def stop(self) -> None:
        if self.strategy.is_deepspeed:
            backend = communication_backend()
            for name in COLLECTIVES:
                vars(backend).pop(name, None)  # the class's own method shows again
        elif self.passing is not None:
            self.passing.__exit__(None, None, None)

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What is sent inside is not the step's: the losses that the metrics bring together."""
        before = {} if self.passing is None else dict(self.passing.bytes)
        yield
        if self.passing is not None:  # else not sent through what is counted
            self.passing.bytes = before

    def median(self) -> Bytes:
        """{collective: bytes per optimizer step}, the median over the counted steps, without the first of several:
        stage 3 has no trace of the modules' order in it, and gathers what it keeps later."""
        return _median([all_of_it for all_of_it, _ in self._settled()])

    def median_between_nodes(self) -> Bytes:
        """The part of `median` whose groups span machines: for one machine, the bytes that it receives."""
        return _median([between for _, between in self._settled()])

    def _settled(self) -> list[tuple[Bytes, Bytes]]:
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
        everywhere, between = self.now
        nodes = {rank // self.per_node for rank in ranks}
        if len(ranks) > 1:
            everywhere[collective] = everywhere.get(collective, 0) + size
        if len(nodes) > 1:
            # an all-to-all's inputs are parts: those of the machine's other processes belong to the same whole
            others = self.per_node * len(nodes) // len(ranks) if collective == "all_to_all" else 1
            between[collective] = between.get(collective, 0) + size * others


def _median(steps: list[Bytes]) -> Bytes:
    names = sorted({name for step in steps for name in step})
    medians = {name: int(statistics.median(step.get(name, 0) for step in steps)) for name in names}
    return {name: size for name, size in medians.items() if size}
