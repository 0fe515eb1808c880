"""Cases of tests/helpers/group.py for FSDP2; arguments and results are JSON."""

from unittest import mock

import run_sft
from tests.helpers.around import before
from tests.helpers.cases import train
from zero_recipes.libs import fsdp
from zero_recipes.metrics import callback as metrics


def train_and_keep_shapes(argv: list[str], left_out: str | None = None) -> dict:
    """`train`, with the shapes of all tensors and the placements that they really had while training; `left_out`: of
    libs/fsdp.py."""
    seen: dict = {}

    def look(*_, model=None, **__) -> None:
        seen["shapes"] = [list(p.shape) for p in model.parameters()]
        seen["placements"] = sorted({str(getattr(p, "placements", None)) for p in model.parameters()})

    without = mock.patch.object(fsdp, left_out or "__name__", lambda *_: None)
    with without, before(metrics.StageMetricsCallback, "on_train_begin", look):
        return train(argv) | seen


def train_as_accelerate(argv: list[str]) -> dict:
    """`train` under accelerate's own mixed precision."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    with mock.patch.object(fsdp, "MixedPrecisionPolicy", lambda **_: plugin.mixed_precision_policy):
        return train(argv)


def gathered_after_evaluation(argv: list[str]) -> dict[str, list[str]]:
    """Parameters that an evaluation leaves gathered, and those that are so once `reshard` was called."""
    from torch.distributed.tensor import DTensor

    trainer = run_sft.train(run_sft.prepare(argv))

    def gathered() -> list[str]:
        return [name for name, p in trainer.model.named_parameters() if not isinstance(p, DTensor)]

    trainer.evaluate()
    before = gathered()
    fsdp.reshard_model(trainer.model)
    return {"before": before, "after": gathered()}
