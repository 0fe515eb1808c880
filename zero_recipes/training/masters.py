"""The fp32 master weights with which a fresh run begins: the values that the weights had before they were rounded."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from zero_recipes.engine.deepspeed import is_partitioned, set_masters
from zero_recipes.engine.faults import stage_0_first_step
from zero_recipes.engine.group import agree

Values = Iterable[tuple[torch.nn.Parameter, Any]]  # (parameter, its values before rounding; None: not known)


@contextmanager
def exact_masters(trainer: Any, loaded_values: Callable[[PreTrainedModel], Values] | None) -> Iterator[None]:
    """Within it DeepSpeed builds its engine for 16-bit weights; at the end its fp32 masters are the loaded values.

    DeepSpeed copies them from the 16-bit weights. A recipe's checkpoint is read again, which takes no host memory;
    other weights are kept, unless they are rounded already. Not on NVMe, where each would read and write a whole group.

    Args:
        trainer: a ZeroSFTTrainer that begins afresh.
        loaded_values: of a model, read again from its files; None where no file is known.
    """
    is_first = trainer.stage_metrics.engine is None
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    values: Values = [(p, p.data if is_first and not is_partitioned(p) else None) for p in trained]
    if loaded_values is not None and isinstance(trainer.model, PreTrainedModel):
        values = loaded_values(trainer.model)
    yield
    optimizer = trainer.model_wrapped.optimizer
    ds_config = trainer.stage_metrics.strategy.ds_config
    stage_0_first_step.fresh_adam_at_stage_0(optimizer)
    can_be_set = not (ds_config.on_nvme or ds_config.bf16_masters)
    every_rank = agree(functools.partial(set_masters, optimizer, values, can_be_set))
    trainer.stage_metrics.exact_master_weights = all(every_rank)
