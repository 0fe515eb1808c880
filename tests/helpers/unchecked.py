"""Runs with rules switched off: what they would end with, or the same rules on a machine that stands in for another."""

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def without_rules(*names: str) -> Iterator[None]:
    """Without the rules of those names in zero_recipes/checks/options.yaml; of none: without any rule."""
    from zero_recipes.checks import deepspeed_rules, preflight, rules

    conditions = rules.conditions

    def others(*found: dict):
        return conditions(*({name: holds for name, holds in each.items() if name not in names} for each in found))

    with contextlib.ExitStack() as off:
        if names:
            for module in (rules, deepspeed_rules):
                off.enter_context(mock.patch.object(module, "conditions", others))
        else:
            for name in ("rule_findings", "deepspeed_findings"):
                off.enter_context(mock.patch.object(preflight, name, lambda *_: []))
        yield
