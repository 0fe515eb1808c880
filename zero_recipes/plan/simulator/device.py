"""A device that stands for a GPU on a machine without one: fake tensors can be on it, apart from the host's.

torch lets a program name a device of its own (PrivateUse1); torch 2.13 without CUDA cannot differentiate fake tensors
on "cuda". Nothing computes here: streams, events and synchronisation do nothing, memory is without end. What its
allocator would reserve is replayed afterwards.
"""

import bisect
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
ENDLESS = 1 << 50

emptied: list = []  # callables, for each `empty_cache`
_streams = [0]  # those that were entered, the innermost last


def stream() -> int:
    """The stream that work goes to now: 0, or that of the innermost `with accelerator.stream(...)`."""
    return _streams[-1]


def answers(value: Any = None):
    """A method that takes anything and answers this."""
    return lambda self, *_, **__: value


class Event:
    __init__ = record = wait = synchronize = answers()
    query = answers(True)
    elapsed_time = answers(1.0)  # milliseconds: DeepSpeed divides bytes by it


class Stream(contextlib.nullcontext):
    made = 0

    def __init__(self, *_, **__):
        super().__init__(self)
        self.id = Stream.made
        Stream.made += 1

    wait_stream = wait_event = synchronize = answers()
    query, record_event = answers(True), answers(Event())


_DEFAULT_STREAM = Stream()  # number 0


@contextlib.contextmanager
def _on(one: Stream | None) -> Iterator[None]:
    _streams.append(0 if one is None else one.id)
    try:
        yield
    finally:
        _streams.pop()


class _Backend:
    """What torch asks of a device's module (torch.gpu.*)."""

    Stream, Event = Stream, Event
    is_available = is_initialized = is_bf16_supported = answers(True)
    device_count, current_device = answers(1), answers(0)
    set_device = manual_seed_all = set_rng_state = synchronize = empty_cache = answers()
    _is_in_bad_fork = answers(False)
    current_stream = answers(_DEFAULT_STREAM)
    mem_get_info = answers((ENDLESS, ENDLESS))
    get_amp_supported_dtype = answers([torch.bfloat16, torch.float16])
    device = stream = answers(contextlib.nullcontext())

    def get_rng_state(self, *_) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8)


def set_up_fake_gpu() -> None:
    """Make the device known to torch and DeepSpeed. Once in a process, before any tensor is made."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    torch.Tensor.record_stream = lambda *_: None
    plain = torch.tensor

    def tensor(*arguments, device=None, **keywords):
        """torch 2.13 copies the numbers from the host, for which this device has no kernel."""
        made = plain(*arguments, **keywords)
        if device is None or torch.device(device).type != NAME:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    torch.tensor = tensor
    _deepspeed_accelerator()


def _deepspeed_accelerator() -> None:
    """DeepSpeed's own description of a GPU: separate memory, streams, work that goes on by itself."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Accelerator(CPU_Accelerator):
        def __init__(self):
            super().__init__()
            self._name, self._communication_backend_name = NAME, "fake"

        is_synchronized_device, is_fp16_supported = answers(False), answers(True)
        current_device, current_device_name, device_count = answers(0), answers(f"{NAME}:0"), answers(1)
        current_stream = default_stream = answers(_DEFAULT_STREAM)
        available_memory = total_memory = answers(ENDLESS)
        memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = answers(0)
        reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = answers()
        memory_stats, device = answers({}), answers(contextlib.nullcontext())

        def device_name(self, device_index=None):
            return NAME if device_index is None else f"{NAME}:{device_index}"

        def stream(self, one):
            return _on(one)

        def empty_cache(self):
            for listener in emptied:
                listener()

        def on_accelerator(self, tensor):
            return tensor.device.type == NAME

        def pin_memory(self, tensor, align_bytes=1, **_):
            return tensor.pin_memory()

    Accelerator.Stream, Accelerator.Event = Stream, Event
    real_accelerator.set_accelerator(Accelerator())


# What PyTorch's caching allocator would reserve for a sequence of allocations: its segments, not its driver's extras. A
# model of torch 2.13 c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments): the names of the
# constants are its own. Fragmentation shows by itself; memory of the CUDA context, of NCCL and of libraries does not.
MIB = 1 << 20
kMinBlockSize = 512  # bytes: every allocation is rounded up to it
kSmallSize = MIB  # larger ones come from segments of their own kind
kSmallBuffer = 2 * MIB
kLargeBuffer = 20 * MIB
kMinLargeAlloc = 10 * MIB
kRoundLarge = 2 * MIB


@dataclass(eq=False)
class Block:
    size: int
    pool: tuple[int, bool]  # stream, whether small
    order: int  # by age of the segment and place in it: stands for the address
    before: Self | None = None
    after: Self | None = None
    free: bool = False


class CachingAllocator:
    """Best fit among the free blocks of a stream and pool, split, and joined again when freed."""

    def __init__(self):
        self.reserved = self.peak = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}
        self._used: dict[int, Block] = {}
        self._addresses = 0

    def allocate(self, number: int, size: int, stream: int) -> None:
        """`number` names the allocation for `release`."""
        size = max(kMinBlockSize, -(-size // kMinBlockSize) * kMinBlockSize)
        pool = (stream, size <= kSmallSize)
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, pool)
        left = block.size - size
        if left >= kMinBlockSize if pool[1] else left > kSmallSize:
            rest = Block(left, pool, block.order + size, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.free = False
        self._used[number] = block

    def release(self, number: int) -> None:
        """Give an allocation back to its pool; its neighbours that are free join it."""
        block = self._used.pop(number)
        for left, right in ((block, block.after), (block.before, block)):
            if left is not None and right is not None and (left.free or right.free):
                self._take(left if left.free else right)
                left.size, left.after, block = left.size + right.size, right.after, left
                if left.after is not None:
                    left.after.before = left
        self._put(block)

    def empty(self) -> None:
        """torch.cuda.empty_cache(): segments that are free as a whole go back to the driver."""
        for free in self._free.values():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            free[:] = [entry for entry in free if entry not in whole]

    def _segment(self, size: int, pool: tuple[int, bool]) -> Block:
        if pool[1]:
            length = kSmallBuffer
        else:
            length = kLargeBuffer if size < kMinLargeAlloc else -(-size // kRoundLarge) * kRoundLarge
        self.reserved += length
        self.peak = max(self.peak, self.reserved)
        self._addresses += 1 << 50
        return Block(length, pool, self._addresses)

    def _put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free.setdefault(block.pool, []), (block.size, block.order, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.order)))


def reserved_peak(events: Iterable[tuple], start: str) -> int:
    """Largest reserved bytes from the first phase `start` on; `events` are those of tracker.LiveStorages."""
    allocator, started = CachingAllocator(), False
    for kind, *what in events:
        if kind == "alloc":
            allocator.allocate(*what)
        elif kind == "free":
            allocator.release(*what)
        elif kind == "empty":
            allocator.empty()
        elif what[0] == start and not started:
            started, allocator.peak = True, allocator.reserved
    return allocator.peak
