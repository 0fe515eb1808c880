"""Cases of tests/engine/test_library_faults.py, run by the workers of tests/helpers/group.py."""

import contextlib
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from tests.helpers.around import before
from tests.helpers.cases import train
from zero_recipes.libs import patches


def timeouts(argv: list[str], patched: bool) -> list[float]:
    """Seconds of the process groups that a run makes."""
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
    from zero_recipes.training.trainer import ZeroSFTTrainer

    limit, usual = timedelta(seconds=2), timedelta(minutes=10)  # a rank of a busy machine may be late by a second
    save_model = ZeroSFTTrainer.save_model

    def quickly_ending(self, *arguments, **keywords):
        for time, act in ((limit, save_model), (usual, lambda *_, **__: None)):
            distributed.barrier()
            distributed_c10d._set_pg_timeout(time, distributed.group.WORLD)
            act(self, *arguments, **keywords)

    def wait(*_, **__) -> None:
        for _ in range(2 if distributed.get_rank() == 0 else 0):  # as long as two collectives that nobody answers
            with contextlib.suppress(RuntimeError):
                distributed_c10d._get_default_store().wait(["fault_cases/never"], limit)

    try:
        with mock.patch.object(ZeroSFTTrainer, "save_model", quickly_ending), before(ZeroSFTTrainer, "_save", wait):
            train(argv)
        return "saved"
    except RuntimeError as error:
        return str(error)


def sent_a_step(argv: list[str], patched: bool) -> dict[str, int]:
    """Bytes of one optimizer step by collective. Unpatched: stage 3 keeps its answers when the trace is dropped."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    with contextlib.ExitStack() as stack:
        if not patched:
            faulty = getattr(Coordinator._invalidate_trace, "unpatched", Coordinator._invalidate_trace)
            stack.enter_context(mock.patch.object(Coordinator, "_invalidate_trace", faulty))
            stack.enter_context(mock.patch.object(patches, "forget_releases_with_the_trace", lambda: None))
        return train(argv)["metrics"]["communication_bytes_per_step"]
