"""Bytes of model states that one rank holds, read off the engine's own tensors.

A byte is counted once: views into a flat buffer, and the buffer, are one range of addresses. Reduce buckets and
parameters that stage 3 has gathered for use are not model states and not counted here; they show in the peak memory.
Read in DeepSpeed 0.19.8; paths below are relative to deepspeed/runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

PARTS = ("params", "grads", "optimizer")


def read(model: torch.nn.Module, optimizer: Any, offload_optimizer: bool, offload_param: bool) -> dict[str, int]:
    """{"params", "grads", "optimizer", "offloaded_host", "offloaded_disk"}: bytes at this moment, on this rank.

    `model` is the bare module, `optimizer` DeepSpeed's ZeRO optimizer or a torch optimizer. Tensors on another device
    than the one that trains, and (in a CPU run, where host and device are one) states that the configuration offloads,
    count as offloaded_host. What DeepSpeed has swapped to disk has no tensor; its files count as offloaded_disk.
    """
    device = _training_device(model)
    tensors = {
        "params": list(_params(model, optimizer)),
        "grads": list(_grads(model, optimizer)),
        "optimizer": list(_optimizer(optimizer, set(map(id, model.parameters())))),
    }
    offloaded = {"params": offload_param, "grads": offload_optimizer, "optimizer": offload_optimizer}
    result, host = {}, []
    for part in PARTS:
        here = [t for t in tensors[part] if t.device.type == device and not (device == "cpu" and offloaded[part])]
        host += [t for t in tensors[part] if t.device.type != device or (device == "cpu" and offloaded[part])]
        result[part] = distinct_bytes(here)
    return {**result, "offloaded_host": distinct_bytes(host), "offloaded_disk": 0}


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that these tensors cover; overlapping ones (views of one buffer) count once."""
    ranges = sorted(
        (t.device.type, t.device.index or 0, t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
        for t in tensors
        if t.numel()
    )
    total, place, end = 0, None, 0
    for kind, index, start, stop in ranges:
        if (kind, index) != place:
            place, end = (kind, index), 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _params(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Stages 1 and 2: the flat 16-bit groups, padding included; stage 3: this rank's partition (`ds_tensor`)."""
    for p in model.parameters():
        yield p.ds_tensor if hasattr(p, "ds_tensor") else p.data
    yield from _flatten(getattr(optimizer, "bit16_groups_flat", None))


def _grads(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Gradients in every form that DeepSpeed keeps them: per parameter, per partition, and the fp32 copy in step()."""
    for p in model.parameters():
        if p.grad is not None:
            yield p.grad
        yield from _flatten(getattr(p, "grad_accum", None))  # zero/stage_1_and_2.py: fill_grad_accum_attribute
    # zero/stage_1_and_2.py: averaged_gradients, all_grad_tensors; zero/stage3.py: grad_partitions_flat_buffer
    for name in ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"):
        yield from _flatten(getattr(optimizer, name, None))
    for master in _masters(optimizer):
        if master.grad is not None:
            yield master.grad


def _optimizer(optimizer: Any, parameters: set[int]) -> Iterator[torch.Tensor]:
    """fp32 masters and every tensor of `optimizer.state`. Without DeepSpeed the master is the parameter itself."""
    for master in _masters(optimizer):
        if id(master) not in parameters:
            yield master
    yield from _flatten(dict(base_optimizer(optimizer).state))


def _masters(optimizer: Any) -> Iterator[torch.Tensor]:
    # zero/stage_1_and_2.py, zero/stage3.py, fp16/unfused_optimizer.py and fp16/fused_optimizer.py
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups",
        "fp32_groups_flat",
    ):
        yield from _flatten(getattr(optimizer, name, None))


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _training_device(model: torch.nn.Module) -> str:
    from deepspeed.accelerator import get_accelerator

    return "cpu" if get_accelerator().device_name() == "cpu" else get_accelerator().device_name().split(":")[0]


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flatten(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
