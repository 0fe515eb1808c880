"""A device that stands for a GPU on a machine without one: fake tensors can be on it, apart from the host's.

torch lets a program name a device of its own (PrivateUse1); torch 2.13 without CUDA cannot differentiate fake tensors
on "cuda". Nothing computes here: streams, events and synchronisation do nothing, memory is without end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
ENDLESS = 1 << 50

_current_stream = [0]
emptied: list = []  # callables, for each `empty_cache`


def stream() -> int:
    """The stream that work goes to now: 0, or that of the innermost `with accelerator.stream(...)`."""
    return _current_stream[-1]


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def wait(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _) -> float:
        return 1.0  # milliseconds: DeepSpeed divides bytes by it


class Stream:
    made = 0

    def __init__(self, *_, **__):
        Stream.made += 1
        self.id = Stream.made

    def wait_stream(self, _):
        pass

    def wait_event(self, _):
        pass

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_) -> Event:
        return Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


_default_stream = Stream()
_default_stream.id = 0


@contextlib.contextmanager
def _on(one: Stream | None) -> Iterator[None]:
    _current_stream.append(0 if one is None else one.id)
    try:
        yield
    finally:
        _current_stream.pop()


class _Backend:
    """What torch asks of a device's module (torch.gpu.*)."""

    Stream, Event = Stream, Event

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, *_):
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _):
        pass

    def get_rng_state(self, *_) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8)

    def set_rng_state(self, *_):
        pass

    def synchronize(self, *_):
        pass

    def current_stream(self, *_) -> Stream:
        return _default_stream

    def stream(self, _):
        return contextlib.nullcontext()

    def device(self, *_):
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, *_) -> bool:
        return True

    def mem_get_info(self, *_) -> tuple[int, int]:
        return ENDLESS, ENDLESS

    def empty_cache(self):
        pass


def set_up_fake_gpu() -> None:
    """Make the device known to torch and DeepSpeed. Once in a process, before any tensor is made."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    torch.Tensor.record_stream = lambda *_: None
    _tensors_from_numbers_on_it()
    _deepspeed_accelerator()


def _tensors_from_numbers_on_it() -> None:
    """torch 2.13: `torch.tensor(numbers, device=...)` copies from the host, for which this device has no kernel."""
    plain = torch.tensor

    def tensor(*arguments, device=None, **keywords):
        made = plain(*arguments, **keywords)
        if device is None or torch.device(device).type != NAME:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor


def _deepspeed_accelerator() -> None:
    """DeepSpeed's own description of a GPU: separate memory, streams, work that goes on by itself."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        def __init__(self):
            super().__init__()
            self._name, self._communication_backend_name = NAME, "fake"

        def is_synchronized_device(self):
            return False

        def device_name(self, device_index=None):
            return NAME if device_index is None else f"{NAME}:{device_index}"

        def device(self, device_index=None):
            return contextlib.nullcontext()

        def current_device(self):
            return 0

        def current_device_name(self):
            return f"{NAME}:0"

        def device_count(self):
            return 1

        def stream(self, one):
            return _on(one)

        def current_stream(self, device_index=None):
            return _default_stream

        default_stream = current_stream

        def empty_cache(self):
            for listener in emptied:
                listener()

        def available_memory(self, device_index=None):
            return ENDLESS

        total_memory = available_memory

        def memory_allocated(self, device_index=None):
            return 0

        max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
        memory_cached = max_memory_cached = memory_allocated

        def memory_stats(self, device_index=None):
            return {}

        def reset_peak_memory_stats(self, device_index=None):
            pass

        reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

        def on_accelerator(self, tensor):
            return tensor.device.type == NAME

        def is_fp16_supported(self):
            return True

        def pin_memory(self, tensor, align_bytes=1, **_):
            return tensor.pin_memory()

    Accelerator.Stream, Accelerator.Event = Stream, Event
    real_accelerator.set_accelerator(Accelerator())
