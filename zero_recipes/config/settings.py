"""The keys of a run by name, each with its value in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from typing import Any


class Settings:
    """Every key of TRL's dataclasses and of ours, by its own name; read-only.

    A value has the type that TRL's parser gives it. A key that does not exist raises AttributeError.
    """

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update(values)

    def __setattr__(self, key: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to {key}: settings are made once")

    def __repr__(self) -> str:
        return f"Settings({vars(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and vars(self) == vars(other)

    def replace(self, **changes: Any) -> Settings:
        return Settings(vars(self) | changes)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32"."""
        return precision_of(self)

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates while it trains; YAML's bare `no` is False."""
        return str(getattr(self.eval_strategy, "value", self.eval_strategy)) not in ("no", "False", "None")

    @property
    def saves_checkpoints(self) -> bool:
        """YAML's bare `no` is False."""
        return str(getattr(self.save_strategy, "value", self.save_strategy)) not in ("no", "False")


def precision_of(arguments: Any) -> str:
    """ "bf16", "fp16" or "fp32" of anything with those attributes: TRL takes bf16 where neither is named."""
    bf16 = arguments.bf16 if arguments.bf16 is not None else not arguments.fp16
    return "bf16" if bf16 else "fp16" if arguments.fp16 else "fp32"
