"""What the libraries do that fake tensors cannot: each is replaced here, in the planning process and nowhere else.

Fake tensors have shapes, dtypes and devices but no numbers, no addresses and no other ranks. Each function below names
the one thing that it replaces.
"""

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# Operators by which Python asks a tensor for its number: `.item()`, `if tensor`, torch.equal
ASKED_FOR = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


def answer_for_number(func, args: tuple) -> float | int | bool:
    """A number for one of ASKED_FOR: a fake tensor has none and would raise. 0.0, False and a byte of 0 take the way of
    a healthy step (no overflow: DeepSpeed 0.19, zero/stage_1_and_2.py `has_overflow`, asks a byte), 1 is a count that
    divides, and two tensors are equal."""
    if func is not aten._local_scalar_dense.default:
        return func is aten.equal.default
    dtype = args[0].dtype
    if dtype.is_floating_point:
        return 0.0
    return False if dtype == torch.bool else 0 if dtype == torch.uint8 else 1


def no_addresses() -> None:
    """DeepSpeed 0.19 (zero/stage3.py, zero/partition_parameters.py) compares `data_ptr()`s, which fake tensors lack."""
    torch.Tensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata


def no_kernels() -> None:
    """DeepSpeed 0.19 (comm/torch.py `TorchBackend`) compiles a kernel for the CPU's collectives, half a minute long.
    Here nothing is sent. To be called before the process group starts."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def no_pinned_memory(pinning: Callable[[], AbstractContextManager] | None = None) -> None:
    """torch 2.13: `pin_memory()` of a fake tensor raises; DeepSpeed pins what it offloads. `pinning`: in force where
    the copy is made that a GPU run pins; on CPUs, None, DeepSpeed makes no copy."""

    def pin_memory(tensor, *_, **__):
        if pinning is None:
            return tensor
        with pinning():
            return tensor.clone()

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda tensor, *_, **__: True


def conversions_by_hand() -> None:
    """torch 2.13, nn/modules/module.py `_apply`: swaps tensors' contents, which a fake parameter refuses. To another
    dtype a parameter stays the object that it is. To another device it becomes a new one (a fake tensor cannot change
    its device), so models are moved before an optimizer knows their parameters."""

    def _apply(module, convert, recurse=True):
        moved: dict[int, torch.nn.Parameter] = {}  # tied parameters stay tied
        with torch.no_grad():
            for child in module.modules() if recurse else [module]:
                for name, parameter in child._parameters.items():
                    if parameter is not None:
                        child._parameters[name] = moved.setdefault(id(parameter), _converted(parameter, convert))
                for name, buffer in child._buffers.items():
                    if buffer is not None:
                        child._buffers[name] = convert(buffer)
        return module

    torch.nn.Module._apply = _apply


def _converted(parameter: torch.nn.Parameter, convert) -> torch.nn.Parameter:
    data = convert(parameter.data)
    if data.device != parameter.device:
        return torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
    if data.dtype != parameter.dtype:
        parameter.data = data
    return parameter


def no_other_ranks() -> None:
    """DeepSpeed 0.19, zero/utils.py `assert_ints_same_as_other_ranks`: the other ranks would answer zeros."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3

    for module in (stage3, partition_parameters, partitioned_param_coordinator):
        module.assert_ints_same_as_other_ranks = lambda ints: None


def masks_by_shape(full_rows: bool, packing: bool) -> None:
    """transformers 5.23, masking_utils.py: looks into the mask, and takes a fake tensor for a compiler's. `full_rows`:
    no row of the batch is padded, so that no mask is made. `packing`: several rows stand in one."""
    from transformers import masking_utils

    masking_utils.is_tracing = lambda tensor=None: False
    masking_utils.fast_all = lambda tensor: full_rows
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: find(positions) if packing else None


def collate_with_numbers() -> None:
    """TRL 1.16, trainer/sft_trainer.py: the padding-free collator looks for rows' boundaries (aten.nonzero). A batch is
    made of real rows on the host; what is made of it afterwards is fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from trl.trainer import sft_trainer

    plain = sft_trainer.DataCollatorForLanguageModeling.torch_call

    def torch_call(collator, examples):
        (mode,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode))
        with _disable_current_modes():
            batch = plain(collator, examples)
        return {key: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}

    sft_trainer.DataCollatorForLanguageModeling.torch_call = torch_call


def data_parallel_in_python() -> None:
    """torch 2.13: DistributedDataParallel's reducer is C++ and reads its parameters' storage."""
    torch.nn.parallel.DistributedDataParallel = BucketedDataParallel


class BucketedDataParallel(torch.nn.Module):
    """DistributedDataParallel's memory: one flat buffer for each bucket of gradients, kept from the beginning.
    torch/csrc/distributed/c10d/reducer.cpp `initialize_buckets`; with gradient_as_bucket_view the gradients live in the
    buckets."""

    def __init__(self, module: torch.nn.Module, gradient_as_bucket_view: bool = False, **_):
        super().__init__()
        self.module = module
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [torch.empty(p.numel(), dtype=p.dtype, device=p.device) for p in self.trainable]
        if gradient_as_bucket_view:
            for parameter, bucket in zip(self.trainable, self.buckets, strict=True):
                parameter.grad = bucket.view(parameter.shape)

    def forward(self, *arguments, **keywords):
        return self.module(*arguments, **keywords)

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def _get_ddp_logging_data(self) -> dict:
        return {"bucket_sizes": str(sum(p.numel() * p.element_size() for p in self.trainable))}


def adam_on_the_host() -> None:
    """DeepSpeed 0.19, ops/adam/cpu_adam.py: a C++ kernel that reads addresses. The states are the same."""
    import deepspeed.ops.adam
    from deepspeed.ops.adam import cpu_adam

    class DeepSpeedCPUAdam(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not self.state[parameter]:
                        state = {"step": 1}
                        for name in ("exp_avg", "exp_avg_sq"):
                            state[name] = torch.zeros_like(parameter.data, device="cpu")
                        self.state[parameter] = state

    for module in (deepspeed.ops.adam, cpu_adam):
        module.DeepSpeedCPUAdam = DeepSpeedCPUAdam


def adam_over_all_tensors() -> None:
    """torch 2.13, optim/optimizer.py `_default_to_fused_or_foreach`: on CUDA plain Adam takes all tensors at once. Its
    intermediate list is as large as the weights that it trains. A fake tensor's class is not among those it takes
    (utils/_foreach_utils.py), and its step count, by which adam.py divides, has no number."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import adam, optimizer

    if FakeTensor not in optimizer._foreach_supported_types:
        optimizer._foreach_supported_types.append(FakeTensor)
    adam._get_value = lambda value: 1.0 if isinstance(value, FakeTensor) else value


def fused_head_without_temporaries() -> None:
    """TRL 1.16, kernels/chunked_logprob.py: on a GPU Triton kernels fold each tile of logits in place. On other devices
    torch folds them with temporaries, which a GPU run does not have."""
    from trl.kernels import chunked_logprob

    chunked_logprob._forward_tile = lambda *_, **__: None
    chunked_logprob._backward_tile = lambda *_, **__: None
    chunked_logprob._addmm_fp32 = lambda *_: None


@contextlib.contextmanager
def loss_of_some(tokens: int) -> Iterator[None]:
    """TRL 1.16, trainer/utils.py `_fused_forward`: on a GPU the head multiplies copies of the hidden states that carry
    loss, `tokens` in one batch; a fake mask cannot say how many."""
    from trl.trainer import utils

    def apply(hidden, weight, bias, targets, *rest):
        some = plain.apply(hidden[:tokens].clone(), weight, bias, targets[:tokens], *rest)
        return tuple(None if one is None else one.new_zeros(len(hidden)) for one in some)

    plain = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = types.SimpleNamespace(apply=apply)
    yield
    utils._ChunkedLogProbFunction = plain


def attention_as_on_cuda() -> None:
    """torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp: flash attention without a mask, memory-efficient with.
    On the device that stands for a GPU torch would take the plain formula, which keeps the whole score matrix."""
    functional, plain = torch.nn.functional, torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(plain)
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.device.type == "cpu":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if attn_mask.dtype == torch.bool:
            # cast before it is expanded to all heads: afterwards each of them would get numbers of its own
            lower = torch.is_autocast_enabled("gpu")
            dtype = torch.get_autocast_dtype("gpu") if lower else query.dtype
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(dtype)
        shape = (*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask.expand(shape), True, dropout_p, is_causal, scale=scale
        )[0]

    functional.scaled_dot_product_attention = attention


def pack_in_4_bits(model: torch.nn.Module, config, device: torch.device) -> None:
    """transformers 5.23 packs weights while it reads them. bitsandbytes 0.50: a fake tensor cannot be a Params4bit
    (nn/modules.py), and its product (backends/cuda/ops.py `gemm_4bit`) unpacks a weight unseen."""
    from bitsandbytes import functional
    from bitsandbytes.nn import modules
    from transformers.quantizers import AutoHfQuantizer

    def parameter(data, requires_grad=False, module=None, **attributes):
        made = torch.nn.Parameter(data, requires_grad=False)
        vars(made).update(attributes)
        return made

    def gemm_4bit(inputs, packed, shape, *scales, bias=None, **nested):
        return torch.nn.functional.linear(inputs, inputs.new_empty(shape), bias)

    modules.Params4bit = parameter
    torch.ops.bitsandbytes.gemm_4bit = types.SimpleNamespace(default=gemm_4bit)
    loaded, model.hf_quantizer = dict(model.named_parameters()), AutoHfQuantizer.from_config(config)
    model.hf_quantizer.preprocess_model(model, device_map=None)
    for name, module in model.named_modules():
        if isinstance(module, modules.Linear4bit):
            of = {key: vars(module.weight)[key] for key in ("compress_statistics", "quant_type", "quant_storage")}
            packed, state = functional.quantize_4bit(loaded[f"{name}.weight"].to(device), **of)
            module.weight, module.bias = parameter(packed, quant_state=state, **of), loaded.get(f"{name}.bias")
    model.hf_quantizer.postprocess_model(model)


FLASH = "kernel_in_one"  # the name of an attention implementation, for flash and flex attention


def flash_attention() -> None:
    """transformers 5.23: flash attention's kernels read numbers and addresses; torch's own keeps the same tensors. No
    mask is made for it, packed rows or not: the kernel is told of the boundaries."""
    from transformers import masking_utils, modeling_utils

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, False, scale=scaling)[0]
        return out.transpose(1, 2), None

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(FLASH, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, lambda *_, **__: None)


def attention_of(requested: str | None, on_gpu: bool) -> str | None:
    """The implementation that a simulated model takes for the recipe's; None: what transformers takes by itself."""
    if requested in (None, "sdpa", "eager"):
        return requested
    return FLASH if on_gpu else None


def replace_parts_of_libraries(
    on_gpu: bool, full_rows: bool, packing: bool, pinning: Callable[[], AbstractContextManager]
) -> None:
    """All of them, for a simulated CPU rank or one on the device that stands for a GPU."""
    no_addresses()
    no_pinned_memory(pinning if on_gpu else None)
    conversions_by_hand()
    no_other_ranks()
    masks_by_shape(full_rows, packing)
    collate_with_numbers()
    data_parallel_in_python()
    adam_on_the_host()
    if on_gpu:
        flash_attention()
        adam_over_all_tensors()
        fused_head_without_temporaries()
        attention_as_on_cuda()


# Autocast for the device that stands for a GPU: runs without DeepSpeed keep fp32 weights and compute in bf16 copies.
# torch 2.13 registers autocast for its own devices in C++ (aten/src/ATen/autocast_mode.h: the lists below are those of
# CUDA). A copy of a weight is made once in a forward pass and kept (autocast_mode.cpp `cached_cast`); backward keeps it
# as long as it needs it.
# AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32, of the operators that language models call
LOWER_PRECISION = ("addmm", "addmv", "baddbmm", "bmm", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention")
# what `attention_as_on_cuda` and `flash_attention` call in place of the last
LOWER_PRECISION += ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
FULL_PRECISION = ("cumsum", "exp", "layer_norm", "log", "log_softmax.int", "logsumexp", "pow.Tensor_Scalar", "prod")
FULL_PRECISION += ("rsqrt", "softmax.int", "softplus", "sum", "sum.dim_IntList", "rms_norm")

_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a weight's id: the weight, its copy
_libraries: list[torch.library.Library] = []  # a registration ends with its library


def set_up_autocast(dtype: torch.dtype) -> None:
    """Register; once in a process."""
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    own = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, target in ((LOWER_PRECISION, dtype), (FULL_PRECISION, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            own.impl(name, _casting(getattr(getattr(torch.ops.aten, packet), overload or "default"), target))
    _libraries.extend([everything, own])
    enabled = torch.is_autocast_enabled  # without a name it asks about CUDA; so does PEFT
    torch.is_autocast_enabled = lambda device="gpu": enabled(device)
    torch.clear_autocast_cache = _copies.clear  # amp/autocast_mode.py: forward ends, or a recomputation


def _casting(operator, dtype: torch.dtype):
    def call(*arguments, **keywords):
        without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(without):
            arguments, keywords = tree_map(lambda value: _cast(value, dtype), (arguments, keywords))
            return operator(*arguments, **keywords)

    return call


def _cast(value, dtype: torch.dtype):
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
        return value
    if not (value.is_leaf and value.requires_grad and dtype != torch.float32):
        return value.to(dtype)
    if id(value) not in _copies:
        _copies[id(value)] = value, value.to(dtype)
    return _copies[id(value)][1]
