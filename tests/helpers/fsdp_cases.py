"""Cases of tests/helpers/group.py for FSDP2; arguments and results are JSON."""

from __future__ import annotations

import run_sft
from tests.helpers.cases import train
from tests.helpers.equivalence_cases import replaced
from zero_recipes.libs import fsdp
from zero_recipes.metrics import callback as metrics


def train_and_keep_shapes(argv: list[str]) -> dict:
    """`train`, with the shapes of all tensors and the placements that they really had while training."""
    seen: dict = {}
    original = metrics.StageMetricsCallback.on_train_begin

    def look(self, args, state, control, model=None, **keywords):
        parameters = list(model.parameters())
        seen["shapes"] = [list(p.shape) for p in parameters]
        seen["placements"] = sorted({str(getattr(p, "placements", None)) for p in parameters})
        return original(self, args, state, control, model=model, **keywords)

    with replaced(metrics.StageMetricsCallback, "on_train_begin", look):
        return train(argv) | seen


def placements_without_the_patch(argv: list[str]) -> list[str]:
    """Those of a CPU run under FSDP2, where accelerate is left to itself."""
    with replaced(fsdp, "shard_on_cpu", lambda: None):
        return train_and_keep_shapes(argv)["placements"]


def losses_by_accelerate(argv: list[str]) -> list[float]:
    """Loss history under accelerate's own mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def own(training_args) -> MixedPrecisionPolicy:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        plugin.set_mixed_precision("bf16")
        return plugin.mixed_precision_policy

    with replaced(fsdp, "mixed_precision", own):
        return train(argv)["metrics"]["loss_history"]


def train_without_names(argv: list[str]) -> dict:
    """`train`, with saving left to transformers."""
    with replaced(fsdp, "keep_names_of_the_file", lambda model: None):
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
