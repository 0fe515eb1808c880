"""What PyTorch's caching allocator would reserve for a sequence of allocations: its segments, not its driver's extras.

A model of torch 2.13 c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments): the names of the
constants are its own. Fragmentation shows by itself; memory of the CUDA context, of NCCL and of libraries does not.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

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
    before: Block | None = None
    after: Block | None = None
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
        if block.after is not None and block.after.free:
            self._take(block.after)
            block.size += block.after.size
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        if block.before is not None and block.before.free:
            self._take(block.before)
            block.before.size += block.size
            block.before.after = block.after
            if block.after is not None:
                block.after.before = block.before
            block = block.before
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
