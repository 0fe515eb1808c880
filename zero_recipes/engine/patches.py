"""Patches for faults of libraries that would change results. A test of each fails when it is no longer needed."""

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import local_world_size
from zero_recipes.engine.deepspeed import is_partitioned, set_adam_step, whole_shape


def patch_libraries(strategy: Strategy, ddp_timeout: int) -> None:
    """Call it before DeepSpeed builds its engine. `ddp_timeout`: seconds."""
    if strategy.is_fsdp:
        gather_head_with_the_final_norm()
    if not strategy.is_deepspeed:
        return
    patch_timeouts(ddp_timeout)
    mark_calls_for_profilers_alone()
    copy_gradients_at_once()
    if strategy.zero_stage in (1, 2):
        quicken_stages_1_and_2()
    if strategy.zero_stage == 3:
        quicken_norms_of_stage_3()
        walk_through_modules_once()
        release_without_messages()
        forget_releases_with_the_trace()
        keep_precision_of_new_adapters()
        read_new_tokens_without_cuda()
    if strategy.ds.quantizes_gradients:
        patch_quantized_gradients()


def replaces(owner: Any, name: str) -> Callable:
    """Decorator: the function takes the place of `owner`'s for the rest of the process. The last one counts.

    It gets the original as its first argument.
    """
    current = getattr(owner, name)
    original = getattr(current, "unpatched", current)

    def put_in_place(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*arguments, **keywords):
            return function(original, *arguments, **keywords)

        replacement.unpatched = original
        setattr(owner, name, replacement)
        return replacement

    return put_in_place


def gather_head_with_the_final_norm() -> None:
    """FSDP2: accelerate finds the final norm of a model inside an adapter too.

    Private: `_find_final_norm` (accelerate 1.15, utils/fsdp_utils.py).
    accelerate makes one group of final norm and LM head, which is gathered when the norm is called. It looks for the
    norm among the children of `model.<base_model_prefix>`: of PEFT's model of a Llama that is the whole Llama, which
    has none. The LM head becomes a group of its own, and stays sharded: TRL's fused head (1.16, trainer/utils.py
    `add_fused_lm_head`) reads its weight and never calls it. DTensor.full_tensor takes the gradient for one that is
    the same on all ranks: each rank's part of a trained head's gradient would be of its own rows alone.
    """
    from accelerate.utils import fsdp_utils
    from peft import PeftModel

    @replaces(fsdp_utils, "_find_final_norm")
    def find_final_norm(find, model):
        return find(model.get_base_model() if isinstance(model, PeftModel) else model)


def fresh_adam_at_stage_0(optimizer) -> None:
    """Undo the step that DeepSpeed takes before training, at stage 0 in bf16 or fp16.

    Adam's counters go back to 0, and the masters are copied from the weights.
    Not for a resumed run: its checkpoint overwrote both.

    Private: `refresh_fp32_params` (DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and fused_optimizer.py).
    `initialize_optimizer_states` calls `optimizer.step()` with zero gradients:
    the bias correction of every later step is off, and weight decay has shrunk the masters once.
    Upstream: deepspeedai/DeepSpeed#5104, the same at stages 1 to 3.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        set_adam_step(optimizer, 0)
        optimizer.refresh_fp32_params()


def load_weights_by_class(model: PreTrainedModel, checkpoint: str) -> None:
    """Put all of a checkpoint's weights into `model`, as from_pretrained would.

    Private: `_load_from_checkpoint` and `_load_best_model` of the Trainer, which call this instead
    (transformers 5.23, trainer.py). Theirs call `load_state_dict(state_dict, False)` with the file's names.
    Weights that saving renames (GPTNeoX: lm_head becomes embed_out) are not loaded, with a mere warning:
    a resumed run has a fresh LM head, a best model the last one's.
    Upstream: huggingface/transformers#48822.
    """
    whole = type(model).from_pretrained(checkpoint, dtype=model.dtype, local_files_only=True)
    with torch.no_grad():
        model.load_state_dict(whole.state_dict())


def freeze_as_the_class_does(model: PreTrainedModel, of_the_class: PreTrainedModel) -> None:
    """Freeze what the model's class freezes. `of_the_class`: the same model from its config, on the meta device.

    Private: `set_param_for_module` (transformers 5.23, core_model_loading.py).
    from_pretrained makes every parameter anew with `requires_grad=True`: a router's bias that its class freezes
    (ERNIE-4.5-MoE) would be given to the optimizer. Not at stage 3, which copies values into the class's parameters.
    """
    frozen = {name for name, p in of_the_class.named_parameters() if not p.requires_grad}
    for name, p in model.named_parameters():
        if name in frozen:
            p.requires_grad_(False)


def without_aliases(
    model: torch.nn.Module, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """A state dict with tied weights once, under the name that they are tied to. Those that differ are kept.

    Private: `Trainer._save`, which calls this first (transformers 5.23, trainer.py).
    modeling_utils.py `remove_tied_weights_from_state_dict` knows tied weights by their memory;
    DeepSpeed (stages 0 to 2: accelerate.get_state_dict) and FSDP2 gather copies.
    Upstream: hiyouga/LLaMA-Factory#10560.
    """
    if not state_dict or not isinstance(model, PreTrainedModel):
        return state_dict
    kept = dict(state_dict)
    for alias, source in model.all_tied_weights_keys.items():
        if alias in state_dict and source in state_dict and torch.equal(state_dict[alias], state_dict[source]):
            del kept[alias]
    return kept


@contextlib.contextmanager
def trained_modules_saved_once() -> Iterator[None]:
    """An adapter's file has the modules of modules_to_save once, under the name by which PEFT loads them.

    Private: `get_peft_model_state_dict` as `PeftModel.save_pretrained` calls it (PEFT 0.21, peft_model.py; from
    utils/save_and_load.py). Where the vocabulary has grown, it adds all that is below the embeddings and the LM head:
    of a trained head also PEFT's own copy, which no loading reads, and the frozen one, which is the base model's.
    """
    from peft import peft_model

    whole = peft_model.get_peft_model_state_dict

    def once(*arguments, **keywords):
        tensors = whole(*arguments, **keywords)
        kept = {}
        for name, tensor in tensors.items():
            own = name.replace(".modules_to_save.", ".").replace(".original_module.", ".")
            if own == name or own not in tensors:
                kept[name] = tensor
        return kept

    with patch.object(peft_model, "get_peft_model_state_dict", once):
        yield


@contextlib.contextmanager
def adapter_dtypes_kept(model: torch.nn.Module) -> Iterator[None]:
    """What trains keeps its dtype while a checkpoint is loaded.

    TRL 1.16, sft_trainer.py (`if _is_quantized_model`) makes QLoRA's adapter bf16;
    transformers 5.23, trainer.py `_load_from_checkpoint` loads it by PEFT's load_adapter, in fp32 again.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, p in model.named_parameters():
        if name in dtypes:
            p.data = p.data.to(dtypes[name])


def patch_timeouts(seconds: int) -> None:
    """Give DeepSpeed's process groups the run's timeout.

    Private: `TorchBackend.new_group` (DeepSpeed 0.19.8, comm/torch.py).
    It passes no timeout on: torch takes its default, 10 minutes under NCCL.
    The engine makes a second group of all ranks (utils/groups.py `_clone_world_group`),
    in which the others wait while one rank saves. Upstream: deepspeedai/DeepSpeed#7533.
    """
    from deepspeed.comm.torch import TorchBackend

    @replaces(TorchBackend, "new_group")
    def new_group(faulty, self, ranks):
        return torch.distributed.new_group(ranks, timeout=timedelta(seconds=seconds))


def quicken_stages_1_and_2() -> None:
    """Stages 1 and 2: look for what is not finite in the norm alone, and compute the norms by one call.

    Losses, norms and skipped steps are the same. With offloaded gradients nothing changes.

    Private: three parts of `step` (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py).
    `check_overflow` takes 13 kernels for each gradient, an all-reduce, and reads the result.
    The norm of the same gradients is infinite or NaN then too, on all ranks, and `step` skips on it.
    `unscale_and_clip_grads` reads the norm anew for each group of parameters, which `step` has accepted.
    `get_grad_norm_direct` copies each gradient to fp64, takes its norm by itself, and copies -1.0 from the host.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    optimizer = stage_1_and_2.DeepSpeedZeroOptimizer

    def norm_decides(self):
        return self.check_grad_overflow and self.compute_grad_norm and not self.cpu_offload

    @replaces(optimizer, "check_overflow")
    def check_overflow(check, self, partition_gradients=True):
        if not norm_decides(self):
            check(self, partition_gradients)

    @replaces(optimizer, "unscale_and_clip_grads")
    def unscale_and_clip_grads(unscale, self, groups, norm):
        accepted = contextlib.nullcontext()
        if norm_decides(self):
            accepted = patch.object(stage_1_and_2, "is_invalid_grad_norm", lambda norm: False)
        with accepted:
            unscale(self, groups, norm)

    @replaces(optimizer, "get_grad_norm_direct")
    def get_grad_norm_direct(direct, self, gradients, params, norm_type=2):
        own = [grad for grad in gradients if not getattr(grad, "_zero_padding", False)]
        if not own or norm_type != 2 or self.model_parallel_rank:
            return direct(self, gradients, params, norm_type)
        return norm_of_all_ranks(own, self.dp_process_group, torch.float32)


def quicken_norms_of_stage_3() -> None:
    """Stage 3: compute the norms of a group's gradients by one call. The norm is the same to the last bit.

    Private: `get_grad_norm_direct` (DeepSpeed 0.19.8, runtime/zero/stage3.py).
    It copies each gradient to fp64, takes its norm by itself, and copies -1.0 from the host.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    @replaces(Optimizer, "get_grad_norm_direct")
    def get_grad_norm_direct(direct, self, gradients, params, norm_type=2):
        group = self._get_param_partition_group(params[0])
        if norm_type != 2 or self.model_parallel_rank or self._autoep_expert_parallel_group(params):
            return direct(self, gradients, params, norm_type)
        return norm_of_all_ranks(gradients, group, torch.float64)


def copy_gradients_at_once() -> None:
    """What a reduction comes to is copied into its gradients by one call; not at stage 3 into offloaded ones.

    Private: `allreduce_and_copy` (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py) and `partition_grads` (stage3.py).
    They launch a kernel for each gradient.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stages1And2

    @replaces(Stages1And2, "allreduce_and_copy")
    def allreduce_and_copy(reduce, self, gradients, *arguments, **keywords):
        unflatten = self.unflatten

        def copied(reduced, gradients):
            torch._foreach_copy_(gradients, unflatten(reduced, gradients))
            return gradients  # DeepSpeed copies them into themselves: no kernel

        with patch.object(self, "unflatten", copied):
            reduce(self, gradients, *arguments, **keywords)

    @replaces(Stage3, "partition_grads")
    def partition_grads(partition, self, parameters, parts):
        if self.offload_optimizer:
            return partition(self, parameters, parts)
        wholes = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        buffers = []
        reduced = []
        for parameter, part in zip(parameters, parts, strict=True):
            if not get_accelerator().is_synchronized_device():
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None
            start = parameter.partition_numel() * self._get_param_partition_rank(parameter)
            if start < parameter.ds_numel:  # the rest is padding
                buffers.append(wholes[parameter.ds_id].narrow(0, 0, part.numel()))
                reduced.append(part)
        if buffers:
            put = torch._foreach_add_ if self.micro_step_id else torch._foreach_copy_
            put(buffers, reduced)
        return buffers


def norm_of_all_ranks(gradients: Sequence[torch.Tensor], group, dtype: torch.dtype) -> torch.Tensor:
    """Of the parts of all ranks in `group`, added up as `dtype`. A scalar: -1 where it is not finite."""
    from deepspeed import comm

    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
    total = torch.stack(norms).pow(2).sum().to(dtype)
    comm.all_reduce(total, group=group)
    norm = total.pow(0.5)
    return norm.masked_fill_(~norm.isfinite(), -1.0)


def mark_calls_for_profilers_alone() -> None:
    """2,170 of them in a step of 24 layers at stage 3.

    Private: `enable_nvtx` (DeepSpeed 0.19.8, utils/nvtx.py).
    """
    from deepspeed.utils import nvtx

    nvtx.enable_nvtx = any(name in os.environ for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"))


def walk_through_modules_once() -> None:
    """Stage 3: for their parameters.

    Private: `get_all_parameters` (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py).
    It walks through each layer for each gather and release, and through the whole model three times after a step.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    remembered = WeakKeyDictionary()

    @replaces(partitioned_param_coordinator, "get_all_parameters")
    def get_all_parameters(walk, module, recurse=False):
        if not recurse:
            return walk(module)
        if module not in remembered:
            remembered[module] = list(module.named_parameters())
        return [*remembered[module], *module.ds_external_parameters()]


def release_without_messages() -> None:
    """Stage 3: DeepSpeed formats six messages for each parameter that it releases, and prints none.

    Private: `__release_param` (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py).
    hpZ, NVMe and fast sharding are left to it.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    @replaces(Coordinator, "_PartitionedParameterCoordinator__release_param")
    def release_param(release, self, parameter, free_data=True):
        is_plain = parameter.ds_zero_param_process_group is None and parameter.ds_tensor.final_location is None
        if not (is_plain and free_data):
            release(self, parameter, free_data)
        elif parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_active_sub_modules:
            free_param(parameter)
            self._PartitionedParameterCoordinator__n_available_params -= parameter.ds_numel


def keep_precision_of_new_adapters() -> None:
    """Stage 3: an adapter keeps the fp32 values that PEFT draws.

    Private: `_get_base_layer_device_and_dtype` (PEFT 0.21, tuners/tuners_utils.py).
    PEFT casts a new adapter to the base's dtype, 16 bits after zero.Init, and then to fp32 again.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    @replaces(BaseTunerLayer, "_get_base_layer_device_and_dtype")
    def device_and_dtype(faulty, self, base_layer):
        device, dtype = faulty(self, base_layer)
        return device, None if any(map(is_partitioned, base_layer.parameters())) else dtype


def read_new_tokens_without_cuda() -> None:
    """Stage 3: the embeddings of new tokens are read on any device.

    Private: `TrainableTokensLayer._collect_token_weights` (PEFT 0.21, tuners/trainable_tokens/layer.py).
    It asks for the current CUDA device to receive rank 0's rows, which ends a run on CPUs once the weights are loaded:
    "Torch not compiled with CUDA enabled". The gathered weight is whole on every rank, and needs no message.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.integrations import gather_params_ctx

    @replaces(TrainableTokensLayer, "_collect_token_weights")
    def collect_token_weights(faulty, self, weight, rows, embed_dim):
        with gather_params_ctx([weight], modifier_rank=None), torch.no_grad():
            return weight[rows].clone()


def one_dtype_of_what_trains(model: torch.nn.Module) -> None:
    """Stage 3 in 16 bits: an adapter's fp32 matrices become 16 bits beside modules that train whole, or new tokens.

    DeepSpeed 0.19.8 (runtime/zero/utils.py `defragment`) lays all that trains into one buffer, and stops with a bare
    AssertionError where dtypes differ. PEFT 0.21 keeps LoRA's matrices in fp32; the others are copies of what zero.Init
    has made 16 bits. At stages 1 and 2 the engine casts all of them. The masters stay exact: the trainer's
    `_own_masters` has the values from before.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    in_16_bits = {p.dtype for p in trained} - {torch.float32}
    if len(in_16_bits) != 1:
        return
    (dtype,) = in_16_bits
    for p in trained:
        if not is_partitioned(p):
            p.data = p.data.to(dtype)


def forget_releases_with_the_trace() -> None:
    """Stage 3: what is released after a module follows from the order of modules in force.

    Private: `_invalidate_trace` and `__params_to_release` (DeepSpeed 0.19.8,
    runtime/zero/partitioned_param_coordinator.py). The latter looks ahead in the recorded order for a parameter's
    next use. It keeps its answers (lru_cache) when the order is recorded anew.
    Generation has no backward pass: after samples before training, every step released parameters in forward and
    gathered them again for backward, whatever stage3_max_reuse_distance says.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    remembered = inspect.getclosurevars(Coordinator._PartitionedParameterCoordinator__params_to_release).nonlocals

    @replaces(Coordinator, "_invalidate_trace")
    def invalidate_trace(faulty, self):
        faulty(self)
        remembered["func"].cache_clear()


def patch_quantized_gradients() -> None:
    """ZeRO++'s qgZ: hand gradients to DeepSpeed's kernel in fp16's range, in groups that it can quantize.

    They become their mean over all ranks.

    Private: `all_to_all_quant_reduce` in stage 3 (DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py).
    Its kernel reads every gradient as fp16 (ops/csrc/quantization/pt_binding.cpp,
    ds_swizzle_quant: `(__half*)input_vals.data_ptr()`): the bits of bf16 and fp32 become other numbers.
    It adds up the devices of a node (quant_reduce.cu, `rop::Add`), and divides by the nodes only:
    matrices' gradients are as many times the mean as a node has devices. Vectors', by reduce-scatter, are the mean.
    Of a shape it checks only that 2 x world divides its size: see `quantized_shape`.

    fp16 ends at 6e-8 and 65504, bf16 does not: a power of two scales each tensor.
    It follows from the largest absolute value on any rank, since the ranks' values are added up.
    Where that is infinite or NaN, the whole gradient is NaN on every rank: int4 has neither.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    def largest_on_any_rank(tensors):
        """The largest absolute value of each tensor. Infinite for NaN, which a maximum over ranks may lose."""
        largest = torch.stack([torch.linalg.vector_norm(tensor, torch.inf).float() for tensor in tensors])
        largest = largest.where(largest.isfinite(), torch.inf)
        comm.all_reduce(largest, op=comm.ReduceOp.MAX)
        return largest

    @replaces(stage3, "all_to_all_quant_reduce")
    def all_to_all_quant_reduce(faulty, tensors, groups):
        world_size = comm.get_world_size()
        given = []
        quantized = []  # indices for the kernel
        for number, tensor in enumerate(tensors):
            shape = quantized_shape(tensor.shape, world_size)
            if shape is not None:
                quantized.append(number)
            given.append(tensor.view(shape or -1))  # vectors go through reduce-scatter
        if not quantized:
            return faulty(given, groups)
        to_mean = []  # factors
        largest = largest_on_any_rank([given[number] for number in quantized])
        for number, most in zip(quantized, largest, strict=True):
            dtype = tensors[number].dtype
            scale = scale_for_fp16(most, world_size, dtype)
            given[number] = (given[number] * scale.to(dtype)).half()
            factor = 1 / scale / get_accelerator().device_count()
            to_mean.append(torch.where(most.isfinite(), factor, torch.nan))
        out = faulty(given, groups)
        for number, factor in zip(quantized, to_mean, strict=True):
            out[number] = out[number].float().mul_(factor).to(tensors[number].dtype)
        return out


ROW = 256  # elements of a group, where the size allows it
LARGEST_GROUP = 40_960


def quantized_shape(shape: Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """(rows, columns) as which DeepSpeed's kernel can quantize a gradient of `shape`. None where it can not.

    It makes max(rows, columns, world_size) groups.
    swizzled_quantize.cu leaves groups out where the ranks do not divide their number.
    It reads 8 values at once, and launches nothing for groups above LARGEST_GROUP.
    quant_reduce.cu takes maxima over warps of 32 threads, of which groups of up to 128 values have 16.
    Offsets are 32-bit integers.
    """
    size = math.prod(shape)
    if len(shape) < 2 or size >= 2**31:
        return None
    if size >= ROW * ROW and size % (ROW * world_size) == 0:
        return size // ROW, ROW
    groups = max(*shape, world_size)
    if len(shape) > 2 or groups % world_size or size % (8 * groups):
        return None
    if 128 < size // groups <= LARGEST_GROUP:
        return tuple(shape)
    return None


def share_not_quantized(model: torch.nn.Module, strategy: Strategy) -> float | None:
    """Of the elements of its gradients. None without qgZ, which quantizes between nodes only."""
    if not strategy.ds.quantizes_gradients:
        return None
    world_size = strategy.world_size
    between_nodes = strategy.zero_stage == 3 and world_size > local_world_size(os.environ, world_size)
    elements = 0
    left_out = 0
    for shape in [whole_shape(p) for p in model.parameters() if p.requires_grad]:
        elements += shape.numel()
        if not between_nodes or quantized_shape(shape, world_size) is None:
            left_out += shape.numel()
    return left_out / max(elements, 1)


def scale_for_fp16(largest: torch.Tensor, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A power of two, an fp32 scalar: `world_size` values of `largest` times it add up to at most 2^15.

    `dtype`: the values', which must hold the power. 1 for an infinite `largest`.
    """
    _, exponent = torch.frexp(largest)  # largest < 2^exponent
    bits = (world_size - 1).bit_length()
    most = 15 if dtype == torch.float16 else 100
    power = (15 - bits - exponent).clamp(-126, most)
    return torch.exp2(torch.where(largest.isfinite(), power, 0).float())


def keep_4bit_layout(model: torch.nn.Module) -> None:
    """Keep 4-bit layers in a layout that can be trained, on CPUs with AVX512-BF16 too.

    Private: `support_avx512bf16_for_cpu` of Linear4bit (bitsandbytes 0.50.2, nn/modules.py).
    There its first forward pass in evaluation mode packs the weights anew, for good.
    autograd/_functions.py (matmul_4bit) then multiplies without autograd in training too:
    after samples or an evaluation no gradient passes a frozen layer, with a mere warning.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def score_supervised_positions_only(wanted: bool) -> None:
    """Have CPUs leave prompts and padding out of the LM head; `wanted` false: as TRL does.

    For the whole process. The last call counts.

    Private: `_use_triton` (TRL 1.16, trainer/utils.py `add_fused_lm_head`).
    TRL leaves them out only where Triton runs (GPUs): Neuron would compile anew for every number of positions.
    CPUs compile nothing, and pay for each position twice: backward computes the logits anew.
    """
    from trl.trainer import utils

    @replaces(utils, "_use_triton")
    def use_triton(runs_on, device):
        return (wanted and device.type == "cpu") or runs_on(device)


def compile_by_layers() -> None:
    """Have accelerate compile each decoder layer, not the model as a whole.

    At stage 3 a model that is compiled as a whole has released the LM head's weight when TRL's fused head (1.16,
    kernels/chunked_logprob.py) reads it in the backward pass.
    """
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"


def let_inputs_have_gradients(model: PreTrainedModel, settings: Settings) -> None:
    """Of an adapter whose layers are leaf modules.

    DeepSpeed 0.19.8 (runtime/zero/stage3.py, reduce_leaf_module_grads) reduces them in a full backward hook. Behind a
    frozen embedding torch calls the first layer's before its gradients exist.
    """
    config = settings.deepspeed
    has_leaves = isinstance(config, dict) and "leaf_module" in config["zero_optimization"]
    if settings.use_peft and has_leaves:
        model.enable_input_require_grads()
