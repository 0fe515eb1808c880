"""Calls of a run that a test watches, something done before them, or what is left out of a run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def before(owner: Any, name: str, act: Callable) -> Iterator[None]:
    """Within it each call of `owner.name` is `act` with the same arguments first."""
    original = getattr(owner, name)

    def call(*arguments, **keywords):
        act(*arguments, **keywords)
        return original(*arguments, **keywords)

    with mock.patch.object(owner, name, call):
        yield


def without(name: str | None) -> contextlib.AbstractContextManager:
    """Within it the function of this dotted name does nothing."""
    return mock.patch(name, lambda *_, **__: contextlib.nullcontext()) if name else contextlib.nullcontext()


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
