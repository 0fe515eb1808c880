"""What the libraries do that fake tensors cannot: each is replaced here, in the planning process and nowhere else.

Fake tensors have shapes, dtypes and devices but no numbers, no addresses and no other ranks.
"""

import contextlib
import functools
import importlib
import types

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# Operators by which Python asks a tensor for its number: `.item()`, `if tensor`, torch.equal
ASKED_FOR = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


def answer_for_number(func, args: tuple) -> float | int | bool:
    """Answer an operator of ASKED_FOR: a fake tensor has no number and would raise.

    0.0, False and a byte of 0 are those of a healthy step (DeepSpeed 0.19, zero/stage_1_and_2.py `has_overflow`).
    1 is a count that divides, and two tensors are equal.
    """
    if func is not aten._local_scalar_dense.default:
        return func is aten.equal.default
    dtype = args[0].dtype
    if dtype.is_floating_point:
        return 0.0
    if dtype == torch.bool:
        return False
    return 0 if dtype == torch.uint8 else 1


def no_addresses() -> None:
    """Give tensors an address: DeepSpeed 0.19 compares `data_ptr()`s, which fake tensors lack.

    See zero/stage3.py and zero/partition_parameters.py.
    """
    torch.Tensor.data_ptr = lambda tensor: tensor.untyped_storage()._cdata


def no_kernels() -> None:
    """Compile no kernel for the process group: DeepSpeed 0.19 (comm/torch.py `TorchBackend`) takes half a minute."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def no_pinned_memory(host=None) -> None:
    """Pin no memory: in torch 2.13 `pin_memory()` of a fake tensor raises, and DeepSpeed pins what it offloads.

    `host`: LiveStorages that see the pinned copy of a GPU run. None: on CPUs DeepSpeed makes none.
    """

    def pin_memory(tensor, *_, **__):
        if host is None:
            return tensor
        host.is_pinned = True
        copy = tensor.clone()
        host.is_pinned = False
        return copy

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda tensor, *_, **__: True


def conversions_by_hand() -> None:
    """Convert parameters one by one: torch 2.13's `_apply` (nn/modules/module.py) swaps tensors' contents.

    A fake parameter refuses that.
    To another dtype a parameter stays the same object. To another device it becomes a new one,
    so models are moved before an optimizer knows their parameters.
    """

    def _apply(module, convert, recurse=True):
        moved = {}  # tied parameters stay tied
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


def masks_by_shape(full_rows: bool, masked_packs: bool) -> None:
    """Make masks by their shape: transformers 5.23 (masking_utils.py) looks into the mask.

    It takes a fake tensor for a compiler's.
    `full_rows`: no row is padded, so no mask is made. `masked_packs`: but one for several rows that stand in one.
    """
    from transformers import masking_utils

    masking_utils.is_tracing = lambda *_: False
    masking_utils.fast_all = lambda tensor: full_rows
    if not masked_packs:
        masking_utils.find_packed_sequence_indices = lambda positions: None


def collate_with_numbers() -> None:
    """TRL 1.16, trainer/sft_trainer.py: the padding-free collator looks for rows' boundaries (aten.nonzero).

    A batch is made of real rows on the host; what is made of it is fake.
    """
    from torch._guards import detect_fake_mode
    from torch.utils._python_dispatch import _disable_current_modes
    from trl.trainer import sft_trainer

    plain = sft_trainer.DataCollatorForLanguageModeling.torch_call

    def torch_call(collator, examples):
        mode = detect_fake_mode()
        with _disable_current_modes():
            batch = plain(collator, examples)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[key] = mode.from_tensor(value)
        return batch

    sft_trainer.DataCollatorForLanguageModeling.torch_call = torch_call


def data_parallel_in_python() -> None:
    """Replace DistributedDataParallel: in torch 2.13 its reducer is C++ and reads its parameters' storage."""
    torch.nn.parallel.DistributedDataParallel = BucketedDataParallel


class BucketedDataParallel(torch.nn.Module):
    """DistributedDataParallel's memory: one flat buffer for each bucket of gradients, kept from the beginning.

    torch/csrc/distributed/c10d/reducer.cpp `initialize_buckets`
    """

    def __init__(self, module: torch.nn.Module, gradient_as_bucket_view: bool = False, **_):
        super().__init__()
        self.module = module
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [torch.empty(p.numel(), dtype=p.dtype, device=p.device) for p in self.trainable]
        if gradient_as_bucket_view:
            for parameter, bucket in zip(self.trainable, self.buckets, strict=True):
                parameter.grad = bucket.view(parameter.shape)

    def forward(self, *arguments, **keywords):
        """Call the module itself."""
        return self.module(*arguments, **keywords)

    def no_sync(self):
        """Do nothing: nothing is ever sent."""
        return contextlib.nullcontext()

    def _get_ddp_logging_data(self) -> dict:
        return {"bucket_sizes": str(sum(bucket.nbytes for bucket in self.buckets))}


def adam_on_the_host() -> None:
    """DeepSpeed 0.19, ops/adam/cpu_adam.py: a C++ kernel that reads addresses. The states are the same."""
    from deepspeed.ops import adam

    class DeepSpeedCPUAdam(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
            super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not self.state[parameter]:
                        state = self.state[parameter]
                        state["step"] = 1
                        for name in ("exp_avg", "exp_avg_sq"):
                            state[name] = torch.zeros_like(parameter.data, device="cpu")

    adam.DeepSpeedCPUAdam = adam.cpu_adam.DeepSpeedCPUAdam = DeepSpeedCPUAdam


def adam_over_all_tensors() -> None:
    """Let Adam take all tensors at once, as plain Adam does on CUDA.

    See torch 2.13, optim/optimizer.py `_default_to_fused_or_foreach`.
    Its intermediate list is as large as the weights that it trains. It does not take a fake tensor's class
    (utils/_foreach_utils.py), whose step count, by which adam.py divides, has no number.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import adam, optimizer

    optimizer._foreach_supported_types.append(FakeTensor)
    adam._get_value = lambda value: 1.0 if isinstance(value, FakeTensor) else value


def fused_head_without_temporaries() -> None:
    """TRL 1.16, kernels/chunked_logprob.py: on a GPU Triton kernels fold each tile of logits in place."""
    from trl.kernels import chunked_logprob

    chunked_logprob._forward_tile = lambda *_, **__: None
    chunked_logprob._backward_tile = lambda *_, **__: None
    chunked_logprob._addmm_fp32 = lambda *_: None


def loss_of_some(tokens: int) -> None:
    """TRL 1.16, trainer/utils.py `_fused_forward`: on a GPU the head multiplies copies of the hidden states with loss.

    `tokens`: those of one batch from now on, which a fake mask cannot say.
    """
    from trl.trainer import utils

    plain = utils._ChunkedLogProbFunction

    def apply(hidden, weight, bias, targets, *rest):
        some = plain.apply(hidden[:tokens].clone(), weight, bias, targets[:tokens], *rest)
        return tuple(None if one is None else one.new_zeros(len(hidden)) for one in some)

    utils._ChunkedLogProbFunction = types.SimpleNamespace(apply=apply)


def attention_as_on_cuda() -> None:
    """Let attention take the kernels of CUDA: flash attention without a mask, memory-efficient with.

    See torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp.
    On another device torch takes the plain formula, which keeps the whole score matrix.
    """
    functional = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    @functools.wraps(plain)
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.device.type == "cpu":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if attn_mask.dtype == torch.bool:
            # before it is expanded: afterwards each head would get numbers of its own
            lower = torch.is_autocast_enabled("gpu")
            dtype = torch.get_autocast_dtype("gpu") if lower else query.dtype
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    functional.scaled_dot_product_attention = attention


def _flash(query, key, value, dropout: float, is_causal: bool, scale: float | None) -> torch.Tensor:
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]


def pack_in_4_bits(model: torch.nn.Module, config, device: torch.device) -> None:
    """Pack a model's weights after they were made: transformers 5.23 packs them while it reads them.

    bitsandbytes 0.50: a fake tensor cannot be a Params4bit (nn/modules.py),
    and its product (backends/cuda/ops.py `gemm_4bit`) unpacks a weight unseen.
    """
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
    loaded = dict(model.named_parameters())
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.hf_quantizer.preprocess_model(model, device_map=None)
    for name, module in model.named_modules():
        if isinstance(module, modules.Linear4bit):
            empty = vars(module.weight)
            layout = {key: empty[key] for key in ("compress_statistics", "quant_type", "quant_storage")}
            packed, state = functional.quantize_4bit(loaded[f"{name}.weight"].to(device), **layout)
            module.weight = parameter(packed, quant_state=state, **layout)
            module.bias = loaded.get(f"{name}.bias")
    model.hf_quantizer.postprocess_model(model)


FLASH = "kernel_in_one"  # our attention implementation for flash and flex attention


def flash_attention() -> None:
    """Replace flash attention by torch's own, which keeps the same tensors.

    transformers 5.23: its kernels read numbers and addresses.
    No mask is made for it, packed rows or not: the kernel is told of the boundaries.
    """
    from transformers import masking_utils, modeling_utils

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        return _flash(query, key, value, dropout, True, scaling).transpose(1, 2), None

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(FLASH, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, lambda *_, **__: None)


def attention_of(requested: str | None, on_gpu: bool) -> str | None:
    """What a simulated model takes for the recipe's; None: transformers' choice."""
    if requested in (None, "sdpa", "eager"):
        return requested
    return FLASH if on_gpu else None


def replace_parts_of_libraries(on_gpu: bool, full_rows: bool, masked_packs: bool, host) -> None:
    """Replace all that fake tensors cannot do. `on_gpu`: on the device that stands for one."""
    no_addresses()
    no_pinned_memory(host if on_gpu else None)
    conversions_by_hand()
    no_other_ranks()
    masks_by_shape(full_rows, masked_packs)
    collate_with_numbers()
    data_parallel_in_python()
    adam_on_the_host()
    if on_gpu:
        flash_attention()
        adam_over_all_tensors()
        fused_head_without_temporaries()
        attention_as_on_cuda()


# Autocast for the device that stands for a GPU: runs without DeepSpeed keep fp32 weights and compute in bf16 copies.
# torch 2.13 registers autocast for its own devices in C++ (aten/src/ATen/autocast_mode.h).
# The operators are those of CUDA's lists AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_FP32 that language models call.
LOWERED = (
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "linear",
    "matmul",
    "mm",
    "mv",
    "scaled_dot_product_attention",
    # what `attention_as_on_cuda` and `flash_attention` call in place of the one before
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
)
IN_FP32 = (
    "cumsum",
    "exp",
    "layer_norm",
    "log",
    "log_softmax.int",
    "logsumexp",
    "pow.Tensor_Scalar",
    "prod",
    "rsqrt",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
    "rms_norm",
)
# A copy of a weight is made once in a forward pass and kept (autocast_mode.cpp `cached_cast`).
_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a weight's id: the weight, its copy
_libraries: list[torch.library.Library] = []  # a registration ends with its library


def set_up_autocast(dtype: torch.dtype) -> None:
    """Register autocast for the device that stands for a GPU, once in a process."""
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    own = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, target in ((LOWERED, dtype), (IN_FP32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(aten, packet), overload or "default")
            own.impl(name, _casting(operator, target))
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
