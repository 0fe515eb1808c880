"""A stand-in for torch.cuda: one stream, two clocks, and an allocator that keeps what was freed until it is emptied.

Work is queued on the device and takes time there; the host goes on at once. Whoever reads a clock or an event before
the device is done reads what a GPU would say: too little, or nothing.
"""

from types import SimpleNamespace

import torch

GIB = 2**30
ANSWERS = {"current_device": 0, "device_count": 1, "is_available": True, "is_initialized": True}
ANSWERS |= {"get_device_name": "NVIDIA Stand-in"}
NUMBERS = {f"memory_{kind}": kind for kind in ("allocated", "reserved")}
NUMBERS |= {f"max_{name}": f"peak_{kind}" for name, kind in NUMBERS.items()}


class FakeCuda:
    """What `torch.cuda` is while a test runs. Times in seconds, sizes in bytes."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.host = 0.0  # the host's clock
        self.done = 0.0  # when the device will have done all that is queued
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0

    def queue(self, seconds: float) -> None:
        """Work for the device."""
        self.done = max(self.done, self.host) + seconds

    def hold(self, size: int) -> None:
        """Tensors of so many bytes in all are alive now."""
        self.allocated = size
        self.reserved = max(self.reserved, size)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def synchronize(self, *_) -> None:
        self.calls.append("synchronize")
        self.host = max(self.host, self.done)

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.reserved = self.allocated

    def reset_peak_memory_stats(self, *_) -> None:
        self.calls.append("reset_peak_memory_stats")
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def get_device_properties(self, *_):
        return SimpleNamespace(name="NVIDIA Stand-in", total_memory=80 * GIB, major=9, minor=0)

    def Event(self, enable_timing: bool = False):
        return FakeEvent(self, enable_timing)


class FakeEvent:
    def __init__(self, cuda: FakeCuda, enable_timing: bool):
        assert enable_timing
        self.cuda, self.at = cuda, None

    def record(self, *_) -> None:
        self.at = max(self.cuda.host, self.cuda.done)

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds. Raises RuntimeError as torch does."""
        if max(self.at, end.at) > self.cuda.host:
            raise RuntimeError("both events must be completed before calculating elapsed time: device not ready")
        return 1000 * (end.at - self.at)


def install(monkeypatch) -> FakeCuda:
    """Puts a stand-in into torch.cuda until the test ends. What the host's clock says is the stand-in's."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator()  # it looks at torch.cuda once: tensors stay where they are
    cuda = FakeCuda()
    for name in dir(cuda):
        if hasattr(torch.cuda, name) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for name, held in NUMBERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, held=held: getattr(cuda, held))
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    # torch's CUDA build asks it in every optimizer step
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
    return cuda
