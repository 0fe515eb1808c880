"""A device that stands for a GPU on a machine without one: fake tensors can be on it, apart from the host's.

torch lets a program name a device of its own (PrivateUse1).
torch 2.13 without CUDA cannot differentiate fake tensors on "cuda".
"""

import contextlib
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
ENDLESS = 1 << 50
BLOCK = 512  # bytes: c10/cuda/CUDACachingAllocator.cpp rounds every allocation up to it


def answers(value: Any = None):
    """Make a method that takes anything and answers this."""
    return lambda self, *_, **__: value


class Event:
    """What stands for torch.cuda.Event: nothing waits."""

    __init__ = record = wait = synchronize = answers()
    query = answers(True)
    elapsed_time = answers(1.0)  # milliseconds: DeepSpeed divides bytes by it


class Stream(contextlib.nullcontext):
    """What stands for torch.cuda.Stream: everything is done at once."""

    def __init__(self, *_, **__):
        super().__init__(self)

    wait_stream = wait_event = synchronize = answers()
    query = answers(True)
    record_event = answers(Event())


_DEFAULT_STREAM = Stream()
_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")  # a registration ends with its library


class _Backend:
    """What torch asks of a device's module (torch.gpu.*)."""

    Stream = Stream
    Event = Event
    is_available = is_initialized = is_bf16_supported = answers(True)
    _is_in_bad_fork = answers(False)
    device_count = answers(1)
    current_device = answers(0)
    current_stream = answers(_DEFAULT_STREAM)
    set_device = manual_seed_all = set_rng_state = synchronize = empty_cache = answers()
    mem_get_info = answers((ENDLESS, ENDLESS))
    get_amp_supported_dtype = answers([torch.bfloat16, torch.float16])
    device = stream = answers(contextlib.nullcontext())

    def get_rng_state(self, *_) -> torch.Tensor:
        """The state of a random generator that makes no numbers."""
        return torch.empty(16, dtype=torch.uint8)


def set_up_fake_gpu() -> None:
    """Register the device that stands for a GPU: once in a process, before any tensor is made."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    torch.Tensor.record_stream = lambda *_: None
    _numbers_without_a_copy()
    _deepspeed_accelerator()


def _numbers_without_a_copy() -> None:
    """torch 2.13: torch.tensor copies from the host, without a kernel here. So does tensor[..., [index]] (Falcon)."""
    plain = torch.tensor

    def tensor(*arguments, device=None, **keywords):
        made = plain(*arguments, **keywords)
        if device is None or torch.device(device).type != NAME:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    def empty_strided(size, stride, dtype=None, **_):
        return torch._C._acc.create_empty_tensor(size, dtype)

    torch.tensor = tensor
    _kernels.impl("empty_strided", empty_strided)
    _kernels.impl("_copy_from", lambda source, to, *_: to)


def _deepspeed_accelerator() -> None:
    """For DeepSpeed: separate memory, streams, work that goes on by itself."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        def __init__(self):
            super().__init__()
            self._name = NAME
            self._communication_backend_name = "fake"

        is_synchronized_device = answers(False)
        is_fp16_supported = answers(True)
        current_device_name = answers(f"{NAME}:0")
        device_count = answers(1)
        current_device = answers(0)
        memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = answers(0)
        available_memory = total_memory = answers(ENDLESS)
        memory_stats = answers({})
        current_stream = default_stream = answers(_DEFAULT_STREAM)
        device = answers(contextlib.nullcontext())

        def device_name(self, device_index=None):
            return NAME if device_index is None else f"{NAME}:{device_index}"

        def on_accelerator(self, tensor):
            return tensor.device.type == NAME

        def pin_memory(self, tensor, align_bytes=1, **_):
            return tensor.pin_memory()

    Accelerator.Stream = Stream
    Accelerator.Event = Event
    real_accelerator.set_accelerator(Accelerator())
