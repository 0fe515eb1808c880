"""Cases of tests/engine/test_library_faults.py, run by the workers of tests/helpers/group.py."""

import contextlib
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed


def timeouts(argv: list[str], patched: bool) -> list[float]:
    """Seconds of the process groups that a run makes."""
    from torch.distributed import distributed_c10d

    from tests.helpers.cases import train
    from zero_recipes.libs import patches

    known = set(distributed_c10d._world.pg_map)
    forget_clone_of_the_world()
    with contextlib.ExitStack() as stack:
        if not patched:
            stack.enter_context(mock.patch.object(patches, "patch_timeouts", lambda seconds: None))
            stack.enter_context(unpatched_groups())
        train(argv)
    made = set(distributed_c10d._world.pg_map) - known
    forget_clone_of_the_world()
    backends = [group._get_backend(torch.device("cpu")) for group in made]
    return [backend.options._timeout.total_seconds() for backend in backends]


@contextlib.contextmanager
def unpatched_groups():
    from deepspeed.comm.torch import TorchBackend

    faulty = getattr(TorchBackend.new_group, "unpatched", TorchBackend.new_group)
    with mock.patch.object(TorchBackend, "new_group", faulty):
        yield


def forget_clone_of_the_world() -> None:
    """DeepSpeed 0.19.8, utils/groups.py: made once for a process."""
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None


def train_with_a_slow_writer(argv: list[str]) -> str:
    """`train`, where rank 0 writes the model for longer than a collective may take; "saved", or what ended the run."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from tests.helpers.cases import train
    from zero_recipes.training.trainer import ZeroSFTTrainer

    limit, usual = timedelta(seconds=2), timedelta(minutes=10)  # a rank of a busy machine may be late by a second
    save_model, save = ZeroSFTTrainer.save_model, ZeroSFTTrainer._save

    def quickly_ending(self, *arguments, **keywords):
        distributed.barrier()
        _set_pg_timeout(limit, distributed.group.WORLD)
        save_model(self, *arguments, **keywords)
        distributed.barrier()
        _set_pg_timeout(usual, distributed.group.WORLD)

    def slowly(self, *arguments, **keywords):
        for _ in range(2 if distributed.get_rank() == 0 else 0):  # as long as two collectives that nobody answers
            with contextlib.suppress(RuntimeError):
                alone_forever(limit)
        save(self, *arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ZeroSFTTrainer, "save_model", quickly_ending))
        stack.enter_context(mock.patch.object(ZeroSFTTrainer, "_save", slowly))
        try:
            train(argv)
            return "saved"
        except RuntimeError as error:
            return str(error)


def alone_forever(limit: timedelta) -> None:
    """Wait for what nobody sends, until the time is over."""
    distributed.distributed_c10d._get_default_store().wait(["fault_cases/never"], limit)


def sent_a_step(argv: list[str], patched: bool) -> dict[str, int]:
    """Bytes of one optimizer step by collective. Unpatched: stage 3 keeps its answers when the trace is dropped."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    from tests.helpers.cases import train
    from zero_recipes.libs import patches

    with contextlib.ExitStack() as stack:
        if not patched:
            faulty = getattr(Coordinator._invalidate_trace, "unpatched", Coordinator._invalidate_trace)
            stack.enter_context(mock.patch.object(Coordinator, "_invalidate_trace", faulty))
            stack.enter_context(mock.patch.object(patches, "forget_releases_with_the_trace", lambda: None))
        return train(argv)["metrics"]["communication_bytes_per_step"]
