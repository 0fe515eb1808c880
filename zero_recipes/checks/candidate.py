"""One run before it starts, as the rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

import yaml

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.process import local_world_size


@cache
def options() -> dict[str, dict[str, Any]]:
    """options.yaml: the texts of rules that are no more than a condition, and tables of values."""
    return yaml.safe_load(resources.files(__package__).joinpath("options.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Candidate:
    settings: Settings  # the keys in force
    strategy: Strategy
    device: str  # "cpu" or "cuda"
    environment: Mapping[str, str]  # the launcher's
    config: Any = None  # the model's configuration; None where it is not at hand, which is refused elsewhere

    @property
    def ds(self) -> DsConfig:
        """The DeepSpeed configuration; an empty one without DeepSpeed."""
        return self.strategy.ds_config or DsConfig({})

    @property
    def stage(self) -> int | None:
        """None without DeepSpeed."""
        return self.strategy.zero_stage

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def ranks_per_node(self) -> int:
        return local_world_size(self.environment, self.world_size)

    @cached_property
    def model(self):
        """The model without memory; None where its configuration is not at hand, or its class cannot be built so."""
        from zero_recipes.model import built_or_none

        return None if self.config is None else built_or_none(self.config, self.settings.trust_remote_code)

    def value(self, path: str) -> Any:
        """What the DeepSpeed configuration has at "zero_optimization.stage"; None where it has nothing."""
        block: Any = self.ds.raw
        for key in path.split("."):
            block = block.get(key) if isinstance(block, Mapping) else None
        return block
