"""DeepSpeed's engine and optimizers: bytes of model states, states of a resharded checkpoint, collectives.

Private: the attributes of DeepSpeed's optimizers in _LAYOUTS, of its partitioned parameters (ds_id, ds_shape,
ds_tensor, ds_secondary_tensor; DeepSpeed 0.19.8, runtime/zero/) and of 4-bit layers (quant_state; bitsandbytes 0.50,
nn/modules.py). No public call returns their bytes. Paths below are relative to deepspeed/runtime.

Private: of the optimizers of stages 1 to 3 (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py) masters,
groups, `_optimizer_step`, `_lazy_init_hp_params_optimizer_state`, `update_lp_params`,
`_reassign_or_swap_out_partitioned_parameters`, `checkpoint_event_epilogue`, `persistent_parameters`;
of stage 0's (fp16/) groups and masters.
No public call fills a fresh engine by parameter, as a resharded checkpoint must.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from zero_recipes.engine.faults.padded_last_part import set_own_part
from zero_recipes.engine.fsdp import local, whole_gradients

# bytes of model states: memory that is kept alive (docs/metrics.md)

STATE_PARTS = ("params", "grads", "optimizer")


class Layout(NamedTuple):
    """Names of the attributes in which an optimizer of DeepSpeed keeps tensors. One that was renamed is an error."""

    weights: list[str]  # beside the parameters
    gradients: list[str]  # beside the parameters' own
    masters: list[str]  # in fp32


# DeepSpeed 0.19.8: zero/stage_1_and_2.py, zero/stage3.py, fp16/, bf16_optimizer.py
_LAYOUTS = {
    "DeepSpeedZeroOptimizer": Layout(
        weights=["bit16_groups_flat"],
        gradients=["averaged_gradients", "all_grad_tensors"],  # views over micro steps
        masters=["single_partition_of_fp32_groups"],
    ),
    "DeepSpeedZeroOptimizer_Stage3": Layout(
        weights=[],
        gradients=["averaged_gradients", "grad_partitions_flat_buffer"],
        masters=["fp32_partitioned_groups_flat"],
    ),
    "FP16_Optimizer": Layout(weights=[], gradients=[], masters=["fp32_groups_flat"]),
    "FP16_UnfusedOptimizer": Layout(weights=[], gradients=[], masters=["fp32_groups"]),
    "BF16_Optimizer": Layout(
        weights=["bf16_groups_flat"],
        gradients=["fp32_groups_gradients_flat"],
        masters=["fp32_groups_flat_partition"],
    ),
}


def _layout(optimizer: Any) -> Layout:
    """Return the layout of an optimizer: empty for a torch optimizer. TypeError for unknown ones."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _LAYOUTS:
            return _LAYOUTS[cls.__name__]
    if isinstance(optimizer, torch.optim.Optimizer):
        return Layout([], [], [])
    raise TypeError(f"{type(optimizer).__name__} is none of {', '.join(_LAYOUTS)}")


def state_bytes(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: Any,
    offload_optimizer: bool,
    offload_param: bool,
) -> dict[str, int]:
    """Return {"params", "grads", "optimizer", "offloaded_host"}: the bytes of model states now, on this rank.

    `model`: the bare module. `parameters`: its own, between two steps.
    `optimizer`: DeepSpeed's ZeRO optimizer or torch's. TypeError for others.
    offloaded_host: on another device than the one that trains, without the counters of torch's optimizers.
    On the CPU, where host and device are one: what the configuration offloads.
    """
    device = _training_device()
    tensors = {
        "params": [*weight_tensors(parameters, optimizer), *_scales(model)],
        "grads": [*gradient_tensors(parameters, optimizer), *whole_gradients(model)],
        "optimizer": [*optimizer_tensors(parameters, optimizer)],
    }
    offloaded = {"params": offload_param, "grads": offload_optimizer, "optimizer": offload_optimizer}
    sizes = {}
    host = []
    for part in STATE_PARTS:
        here = []
        for tensor in map(local, tensors[part]):
            elsewhere = tensor.device.type != device and tensor.dim() > 0
            if elsewhere or (device == "cpu" and offloaded[part]):
                host.append(tensor)
            else:
                here.append(tensor)
        sizes[part] = distinct_bytes(here)
    sizes["offloaded_host"] = distinct_bytes(host)
    return sizes


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Add up the bytes of the storages behind tensors, each counted once and whole."""
    storages = {tensor.untyped_storage() for tensor in tensors}  # one object for all views
    return sum(storage.nbytes() for storage in storages)


def weight_tensors(parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the weights.

    Stages 1 and 2: the flat 16-bit groups, with padding.

    Stage 3: this rank's partition; under hpZ also its part of the machine's copy (`ds_secondary_tensor`).
    """
    if is_stage_3(optimizer):
        for p in parameters:
            yield p.ds_tensor
            yield from _flatten(p.ds_secondary_tensor)
    else:
        yield from parameters
    yield from _attributes(optimizer, _layout(optimizer).weights)


def is_partitioned(p: torch.nn.Parameter) -> bool:
    """Whether stage 3 has cut a parameter into one part a rank."""
    return hasattr(p, "ds_id")


def whole_size(p: torch.nn.Parameter) -> int:
    """Return the number of a parameter's elements on all ranks together."""
    return whole_shape(p).numel()


def whole_shape(p: torch.nn.Parameter) -> torch.Size:
    """Return the shape that a parameter had before partitioning."""
    return p.ds_shape if is_partitioned(p) else p.shape


def packed_weights(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Yield (weight, bitsandbytes' QuantState) of every 4-bit layer: scales, and the shape before packing.

    FSDP2 replaces the weights. The layer keeps the state then
    (bitsandbytes 0.50, nn/modules.py, fix_4bit_weight_quant_state_from_module).
    """
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        weight = own.get("weight")  # PEFT's layer has its base's
        state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if state is not None:
            yield weight, state


def _scales(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the scales of 4-bit weights, which are no parameters, and whole on every rank."""
    for _, state in packed_weights(model):
        yield from _flatten(vars(state))
        if state.nested:
            yield from _flatten(vars(state.state2))


def gradient_tensors(parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield gradients as each stage keeps them, and the fp32 copies of DeepSpeed's step().

    From stage 2 on a parameter's own only passes through the reduce bucket.
    """
    layout = _layout(optimizer)
    stage_1_or_2 = _is(optimizer, "DeepSpeedZeroOptimizer")
    if stage_1_or_2 and not optimizer.partition_gradients:
        yield from _gradients_outside_buckets(parameters, optimizer.ipg_buckets.values())
    elif not stage_1_or_2 and not is_stage_3(optimizer):
        yield from _gradients_outside_buckets(parameters, [])
    yield from _attributes(optimizer, layout.gradients)
    if stage_1_or_2:  # copy_grads_in_partition makes it with the first gradient
        yield from _flatten(getattr(optimizer, "grads_in_partition", None))
    for master in _attributes(optimizer, layout.masters):
        if master.grad is not None:
            yield master.grad


def _gradients_outside_buckets(parameters: Sequence[torch.nn.Parameter], buckets: Iterable) -> Iterator[torch.Tensor]:
    """Yield gradients that hold memory of their own: stage 1 leaves small ones as views into their reduce bucket."""
    reduced = set()
    for bucket in buckets:
        reduced.update(buffer.untyped_storage() for buffer in bucket.buffer)
    for p in parameters:
        # zero/stage_1_and_2.py: fill_grad_accum_attribute may make the second one
        for grad in (p.grad, getattr(p, "grad_accum", None)):
            if grad is not None and local(grad).untyped_storage() not in reduced:
                yield grad


def optimizer_tensors(parameters: Sequence[torch.nn.Parameter], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield fp32 masters and `optimizer.state`. Without DeepSpeed the master is the parameter itself."""
    known = set(map(id, parameters))
    for master in _attributes(optimizer, _layout(optimizer).masters):
        if id(master) not in known:
            yield master
    yield from _flatten(dict(base_optimizer(optimizer).state))


def _attributes(optimizer: Any, names: list[str]) -> Iterator[torch.Tensor]:
    for name in names:
        yield from _flatten(getattr(optimizer, name))


def _is(optimizer: Any, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(optimizer).__mro__)


def base_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _training_device() -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name().split(":")[0]


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def is_stage_3(optimizer: Any) -> bool:
    """Whether an optimizer is DeepSpeed's of stage 3."""
    return _is(optimizer, "DeepSpeedZeroOptimizer_Stage3")


# masters and moments, set from outside


def set_state(p: torch.nn.Parameter, key: str, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole master or moment ("fp32", "exp_avg", "exp_avg_sq") into place."""
    from deepspeed import utils

    state = None if key == "fp32" else key  # DeepSpeed sets the master where no state is named
    if is_partitioned(p):
        set_own_part(p, own_part(p, whole), state)
    else:
        utils.safe_set_full_optimizer_state(p, whole, state)


def own_part(p: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of `whole`, flat. All of them below stage 3."""
    if not is_partitioned(p):
        return whole.flatten()
    size = p.ds_tensor.numel()
    start = torch.distributed.get_rank(p.ds_process_group) * size
    return whole.flatten()[start : start + size]


@torch.no_grad()
def set_masters(optimizer, values: Iterable[tuple], can_be_set: bool = True) -> bool:
    """Set this rank's fp32 masters where the weights, 16-bit copies of `values`, have lost bits.

    The weights stay. `values`: (trained parameter, whole tensor or None if unknown).
    Returns whether all masters are the values.
    """
    at_stage_0 = _masters_at_stage_0(optimizer)
    exact = True
    for p, value in values:
        if value is None:
            exact = False
            continue
        if torch.promote_types(value.dtype, p.dtype) == p.dtype:  # its dtype holds all of it
            continue
        weight = p.ds_tensor.data if is_partitioned(p) else p.data.flatten()
        mine = own_part(p, value).to(weight.device)
        rounded = mine.to(p.dtype)
        if torch.equal(rounded.to(mine.dtype), mine):
            continue
        if not can_be_set or not torch.equal(rounded, weight[: mine.numel()]):  # no longer the weight's
            exact = False
        elif id(p) in at_stage_0:
            master = at_stage_0[id(p)]
            master.copy_(mine.view(master.shape))
        else:
            set_state(p, "fp32", value)
    return exact


def _masters_at_stage_0(optimizer) -> dict[int, torch.Tensor]:
    """Return {id of a weight: its master}, with FusedAdam a part of a flat one. Empty at other stages."""
    found: dict[int, torch.Tensor] = {}
    if _is(optimizer, "FP16_Optimizer"):
        for members, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            masters = flat.split([p.numel() for p in members])
            found |= zip(map(id, members), masters, strict=True)
    elif _is(optimizer, "FP16_UnfusedOptimizer"):
        for members, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            found |= zip(map(id, members), masters, strict=True)
    return found


def flat_masters(optimizer) -> list[torch.Tensor]:
    """Return this rank's flat fp32 masters, one a group (stage 3: a sub-group). For stages 1 to 3."""
    if is_stage_3(optimizer):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def members_of_groups(optimizer) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of each of `optimizer.param_groups`. For stages 1 to 3."""
    if not is_stage_3(optimizer):
        return [list(members) for members in optimizer.bit16_groups]
    count = 1 + max(optimizer.sub_group_to_group_id.values(), default=-1)
    groups: list[list[torch.nn.Parameter]] = [[] for _ in range(count)]
    for number, members in enumerate(optimizer.fp16_groups):  # stage 3 cuts groups into sub-groups
        groups[optimizer.sub_group_to_group_id[number]] += members
    return groups


def make_adam_states(optimizer) -> None:
    """Let any Adam make its states, to be overwritten: one step with zero gradients at a rate of 0.

    DeepSpeed makes none before the first step (zero/stage3.py, stage_1_and_2.py `initialize_optimizer_states`).
    """
    base = base_optimizer(optimizer)
    stage_3 = is_stage_3(optimizer)
    masters = flat_masters(optimizer)
    rates = [group["lr"] for group in base.param_groups]
    grads = [master.grad for master in masters]  # offloaded ones keep a buffer
    for group in base.param_groups:
        group["lr"] = 0.0
    for number, master in enumerate(masters):
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        else:
            master.grad.zero_()
        if stage_3:
            optimizer._optimizer_step(number)
            master.grad = grads[number]
    if not stage_3:
        base.step()
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        optimizer._lazy_init_hp_params_optimizer_state()  # links parameters to their states
    for group, rate in zip(base.param_groups, rates, strict=True):
        group["lr"] = rate


def set_adam_step(optimizer, step: int) -> None:
    """Set the step counter of an Adam. Each state gets its own: one that two groups share would count twice a step."""
    base = base_optimizer(optimizer)
    for counters in (*base.state.values(), *base.param_groups):  # FusedAdam counts in its groups, with integers
        counter = counters.get("step")
        if torch.is_tensor(counter):
            counters["step"] = torch.full_like(counter, step)
        elif counter is not None:
            counters["step"] = step


def refresh_weights(optimizer) -> None:
    """Set the 16-bit weights from the fp32 masters, as DeepSpeed does after each step."""
    if not is_stage_3(optimizer):
        optimizer.update_lp_params()
        return
    for number in range(len(flat_masters(optimizer))):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters
    if persistent:  # small parameters stay gathered: gather them anew
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


# collectives


class Collective(NamedTuple):
    """One method of DeepSpeed's backend."""

    kind: str  # the collective, in metrics.json
    full: str  # the argument with the full tensor
    arguments: tuple[str, ...]  # all of them, in order


# comm/torch.py, whose decorators hide the methods' signatures
COLLECTIVES = {
    "all_reduce": Collective("all_reduce", "tensor", ("tensor", "op", "group")),
    "inference_all_reduce": Collective("all_reduce", "tensor", ("tensor", "op", "group")),
    "all_reduce_coalesced": Collective("all_reduce", "tensors", ("tensors", "op", "group")),
    "all_gather": Collective("all_gather", "tensor_list", ("tensor_list", "tensor", "group")),
    "all_gather_into_tensor": Collective("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_base": Collective("all_gather", "output_tensor", ("output_tensor", "input_tensor", "group")),
    "all_gather_coalesced": Collective("all_gather", "output_tensors", ("output_tensors", "input_tensors", "group")),
    "reduce_scatter": Collective("reduce_scatter", "input_list", ("output", "input_list", "op", "group")),
    "reduce_scatter_tensor": Collective(
        "reduce_scatter", "input_tensor", ("output_tensor", "input_tensor", "op", "group")
    ),
    "all_to_all": Collective("all_to_all", "input_tensor_list", ("output_tensor_list", "input_tensor_list", "group")),
    "all_to_all_single": Collective(
        "all_to_all", "input", ("output", "input", "output_splits", "input_splits", "group")
    ),
    "reduce": Collective("reduce", "tensor", ("tensor", "dst", "op", "group")),
    "broadcast": Collective("broadcast", "tensor", ("tensor", "src", "group")),
}


def communication_backend():
    """Return the object with DeepSpeed's collectives.

    Private: `cdb` and the methods of COLLECTIVES (DeepSpeed 0.19.8, comm/comm.py and comm/torch.py).
    DeepSpeed's logger (comm.py `timed_op`) waits for the device at every collective and does not know the group.
    """
    from deepspeed import comm

    return comm.comm.cdb
