"""The values of all keys of a recipe, and what several of them mean together."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

from zero_recipes.core.findings import refusal


class Settings(SimpleNamespace):
    """The value of every key of TRL's dataclasses and of ours, as an attribute. Nothing writes into it.

    A value has the type that TRL's parser gives it. A key that does not exist raises AttributeError.
    """

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some keys."""
        return Settings(vars(self) | changes)

    def as_dict(self) -> dict[str, Any]:
        """{key: value} in a dictionary of its own."""
        return dict(vars(self))

    @property
    def precision(self) -> str:
        """The precision that the keys ask for: "bf16", "fp16" or "fp32"."""
        return precision_of(self)

    @property
    def optimizer_name(self) -> str:
        """The value of `optim` as text; it may be a member of transformers' OptimizerNames."""
        return str(getattr(self.optim, "value", self.optim))

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates while it trains; YAML's bare `no` is False."""
        return self.eval_strategy not in ("no", False, None)

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        if self.activation_checkpointing is None:
            return bool(self.gradient_checkpointing)  # transformers' old name
        return bool(self.activation_checkpointing)

    @property
    def clones_tokenizer(self) -> bool:
        """Whether chat_template_path is another tokenizer, whose tokens TRL adds to the model."""
        path = self.chat_template_path
        return path is not None and not path.endswith((".jinja", ".j2"))

    @property
    def streams(self) -> bool:
        """Whether rows are read as they are trained on."""
        return self.streaming if self.datasets else self.dataset_streaming

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the run saves checkpoints; YAML's bare `no` is False."""
        return self.save_strategy not in ("no", False)

    @property
    def joined_by(self) -> str | None:
        """The key that puts several rows into one sequence: "packing", "padding_free" or None."""
        if self.packing:
            return "packing"
        if self.padding_free:
            return "padding_free"
        return None


def precision_of(arguments: Any) -> str:
    """The precision that `bf16` and `fp16` of any object ask for. TRL takes bf16 where neither is named.

    Returns: "bf16", "fp16" or "fp32".
    """
    if arguments.bf16 or (arguments.bf16 is None and not arguments.fp16):
        return "bf16"
    return "fp16" if arguments.fp16 else "fp32"


def computed_in(precision: str, dtype: Any) -> str:
    """The precision in which weights of `dtype` compute: without mixed precision in their own.

    Returns: "bf16", "fp16" or "fp32".
    """
    if precision != "fp32":
        return precision
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."), "fp32")


def loaded_dtype(settings: Settings, saved: Any) -> str:
    """The dtype of the weights as they are loaded, as "float32".

    `saved`: the dtype of the checkpoint's weights, None where it names none.
    """
    requested = (settings.model_init_kwargs or {}).get("dtype") or settings.dtype
    if requested in ("auto", None):
        requested = saved or "float32"
    return str(requested).removeprefix("torch.")


def derive_accumulation(settings: Settings, explicit: Mapping[str, Any], world_size: int) -> int | None:
    """Derive gradient_accumulation_steps from global_batch_size, the sequences per optimizer step.

    `world_size`: processes with rows of their own. Returns None without that key. Raises Refusal where no whole number
    gives that batch, or the recipe names another.
    """
    total = settings.global_batch_size
    if total is None:
        return None
    micro = settings.per_device_train_batch_size
    per_pass = world_size * micro
    if total <= 0 or total % per_pass:
        fitting = {per_pass * max(1, total // per_pass), per_pass * (max(0, total // per_pass) + 1)}
        near = " or ".join(map(str, sorted(fitting)))
        raise refusal("ZR121", total=total, world_size=world_size, micro=micro, near=near)
    derived = total // per_pass
    requested = explicit.get("gradient_accumulation_steps")
    if requested is not None and requested != derived:
        raise refusal("ZR122", total=total, requested=requested, world_size=world_size, micro=micro, derived=derived)
    return derived


def steps_by_epochs(rows: int, settings: Settings, replicas: int) -> int:
    """Count the optimizer steps of a run by epochs (transformers 5.23 trainer.py, `set_initial_training_values`)."""
    micro = settings.per_device_train_batch_size
    batches = math.ceil(math.ceil(rows / micro) / replicas)
    if settings.dataloader_drop_last:
        batches = rows // micro // replicas
    steps = math.ceil(batches / settings.gradient_accumulation_steps)
    return math.ceil(settings.num_train_epochs * max(steps, 1))
