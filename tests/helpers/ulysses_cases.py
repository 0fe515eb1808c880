"""Cases of tests/helpers/group.py for Ulysses; arguments and results are JSON."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from trl import SFTTrainer

from tests.helpers.around import before
from tests.helpers.cases import train
from zero_recipes.training.trainer import ZeroSFTTrainer


@contextlib.contextmanager
def left_as_it_was() -> Iterator[None]:
    """DeepSpeed puts its attention and its groups into the process for good; other cases run in it after this one."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # of the instance; the class still has transformers' own
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None


def train_sharing(argv: list[str]) -> dict:
    """`train`, and nothing left behind."""
    with left_as_it_was():
        return train(argv)


def train_with_a_mean_for_each_micro_batch(argv: list[str]) -> dict:
    """`train_sharing`, with the loss left to transformers and TRL."""
    left_to_trl = mock.patch.object(ZeroSFTTrainer, "compute_loss", SFTTrainer.compute_loss)
    counts = before(ZeroSFTTrainer, "train", lambda self, *_: setattr(self, "model_accepts_loss_kwargs", False))
    with left_to_trl, counts:
        return train_sharing(argv)
