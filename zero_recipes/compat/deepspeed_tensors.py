"""Bytes of model states that one rank holds, read off the engine's own tensors.

What counts is the memory that is kept alive: whole storages, each once. Reduce buckets, gradients in flight and
parameters that stage 3 has gathered for use are not model states; they show in the peak memory.
Read in DeepSpeed 0.19.8; paths below are relative to deepspeed/runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zero_recipes.distributed.fsdp import local, whole_gradients

PARTS = ("params", "grads", "optimizer")


def read(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: Any,
    offload_optimizer: bool,
    offload_param: bool,
) -> dict[str, int]:
    """{"params", "grads", "optimizer", "offloaded_host"}: bytes at this moment, on this rank.

    `model` is the bare module, `parameters` are its own between two steps, `optimizer` is DeepSpeed's ZeRO optimizer or
    a torch optimizer. Tensors on another device than the one that trains, and (in a CPU run, where host and device are
    one) states that the configuration offloads, count as offloaded_host. What DeepSpeed has swapped to disk has no
    tensor: zero_recipes/distributed/nvme.py counts its files.
    """
    device = _training_device()
    tensors = {
        "params": [*map(local, _params(parameters, optimizer)), *_scales(model)],
        "grads": [*map(local, _grads(parameters, optimizer)), *whole_gradients(model)],
        "optimizer": list(map(local, _optimizer(optimizer, set(map(id, parameters))))),
    }
    offloaded = {"params": offload_param, "grads": offload_optimizer, "optimizer": offload_optimizer}
    result, host = {}, []
    for part in PARTS:
        here = [t for t in tensors[part] if t.device.type == device and not (device == "cpu" and offloaded[part])]
        host += [t for t in tensors[part] if t.device.type != device or (device == "cpu" and offloaded[part])]
        result[part] = distinct_bytes(here)
    return {**result, "offloaded_host": distinct_bytes(host)}


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that these tensors keep alive: whole storages, each counted once."""
    storages = {}
    for tensor in tensors:
        storages[_place(tensor)] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage()._cdata  # fake tensors (zero_recipes/plan) have no address


def _params(parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Stages 1 and 2: the flat 16-bit groups, padding included; stage 3: this rank's partition (`ds_tensor`), and its
    part of the machine's copy under hpZ (`ds_secondary_tensor`)."""
    for p in parameters:
        yield getattr(p, "ds_tensor", p)
        yield from _flatten(getattr(p, "ds_secondary_tensor", None))
    yield from _flatten(getattr(optimizer, "bit16_groups_flat", None))


def packed_weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """(weight, bitsandbytes' QuantState) of every layer in 4 bit: its scales, and the shape before packing.

    FSDP2 makes other parameters of the weights; the layer keeps the state then (bitsandbytes 0.50, nn/modules.py,
    fix_4bit_weight_quant_state_from_module).
    """
    for module in model.modules():
        weight = module._parameters.get("weight")  # PEFT's layer has its base's as a property
        state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if state is not None:
            yield weight, state


def _scales(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What 4-bit weights are multiplied with, 4 bytes for 64 of them, itself quantised where it is nested: no
    parameter, and whole on every rank."""
    for _, state in packed_weights(model):
        yield from _flatten(vars(state))
        yield from _flatten(vars(state.state2) if state.nested else None)


def _grads(parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Gradients as each stage keeps them, and the fp32 copies that DeepSpeed makes inside step().

    From stage 2 on a parameter's own gradient is in flight only, on its way through the reduce bucket.
    """
    if not _partitions_gradients(optimizer):
        # stage 1 leaves small gradients as views into the bucket that has reduced them
        buckets = {_place(buffer) for b in getattr(optimizer, "ipg_buckets", {}).values() for buffer in b.buffer}
        for p in parameters:
            for grad in (p.grad, getattr(p, "grad_accum", None)):  # zero/stage_1_and_2.py: fill_grad_accum_attribute
                if grad is not None and _place(local(grad)) not in buckets:
                    yield grad
    # zero/stage_1_and_2.py: the buffer of copy_grads_in_partition, and the lists that keep its views over micro steps;
    # zero/stage3.py: grad_partitions_flat_buffer
    for name in ("grads_in_partition", "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"):
        yield from _flatten(getattr(optimizer, name, None))
    for master in _masters(optimizer):
        if master.grad is not None:
            yield master.grad


def _partitions_gradients(optimizer: Any) -> bool:
    return getattr(optimizer, "partition_gradients", False) or hasattr(optimizer, "grad_partitions_flat_buffer")


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


def _training_device() -> str:
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
