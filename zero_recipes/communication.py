"""Bytes that one optimizer step sends through each collective, as sizes of the full, unsharded tensors."""

from __future__ import annotations

import statistics
from typing import Any

from torch.distributed.fsdp import FSDPModule

from zero_recipes.collectives import CountCollectives, in_force

# DeepSpeed's function names (deepspeed/comm/comm.py) by the collective that they are
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    "broadcast": "broadcast",
}


class CommunicationCounter:
    """Counts some steps of one run: DeepSpeed's through its own logger, DDP's by its buckets, FSDP2's as they pass.

    DeepSpeed's logger synchronises the device around every collective (comm.py `timed_op`), so it is on only during
    warm-up steps, which no timing includes.
    """

    def __init__(self, engine: Any, world_size: int):
        self.engine, self.world_size = engine, world_size
        self.steps: list[dict[str, int]] = []
        self.passing = CountCollectives() if isinstance(engine, FSDPModule) else None

    @property
    def _is_deepspeed(self) -> bool:
        from deepspeed import DeepSpeedEngine

        return isinstance(self.engine, DeepSpeedEngine)

    def start(self) -> None:
        if self._is_deepspeed:
            from deepspeed import comm

            comm.configure(enabled=True, prof_all=True, verbose=False)
            comm.comm.comms_logger.reset_data()
        elif self.passing is not None:
            in_force(self.passing, True)

    def end_step(self) -> None:
        """Close one optimizer step."""
        if self._is_deepspeed:
            self.steps.append(self._logged())
        elif self.passing is not None:
            self.steps.append(self.passing.take())
        elif self.world_size > 1:
            self.steps.append({"all_reduce": ddp_bucket_bytes(self.engine)})

    def stop(self) -> None:
        if self._is_deepspeed:
            from deepspeed import comm

            comm.configure(enabled=False, prof_all=False)
        elif self.passing is not None:
            in_force(self.passing, False)

    def median(self) -> dict[str, int]:
        """{collective: bytes per optimizer step}, the median over the counted steps."""
        names = sorted({name for step in self.steps for name in step})
        return {name: int(statistics.median(step.get(name, 0) for step in self.steps)) for name in names}

    def _logged(self) -> dict[str, int]:
        from deepspeed import comm

        totals: dict[str, int] = {}
        for function, sizes in comm.comm.comms_logger.get_raw_data().items():
            collective = _COLLECTIVES.get(function)
            if collective is None:
                continue
            # the logger records what goes in: of an all-gather that is one shard of the full tensor
            factor = self.world_size if collective == "all_gather" else 1
            total = sum(size * record[0] for size, record in sizes.items()) * factor
            totals[collective] = totals.get(collective, 0) + total
        comm.comm.comms_logger.reset_data()
        return {name: total for name, total in totals.items() if total}


def ddp_bucket_bytes(model: Any) -> int:
    """Bytes of all gradient buckets of DistributedDataParallel; each goes through one all-reduce a step."""
    logged = model._get_ddp_logging_data()  # rebuilt after the first backward pass
    buckets = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return sum(int(size) for size in str(buckets).split(",") if size.strip())
