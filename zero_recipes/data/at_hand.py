"""Whether the data that a recipe names is there, with the splits that it names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zero_recipes.core.findings import Refusal, first_line, refusal


def refuse_absent_data(named: list[str | None]) -> None:
    """Refuse data that is not named, and paths where nothing is. Raises Refusal."""
    if not any(named):
        raise refusal("ZR504")
    for name in named:
        if is_path(name) and not Path(str(name)).exists():
            raise refusal("ZR505", name=name, cwd=Path.cwd())


def refuse_missing_split(known: Iterable[str], name: str, key: str) -> None:
    """Refuse a split that the data does not have. `key`: the recipe's, which names it. Raises Refusal."""
    if name not in known:
        raise refusal(
            "ZR507",
            name=name,
            known=", ".join(known),
            key=key,
            why=" (eval_strategy needs one)." if "test" in key else ".",
            fix=', use `datasets:` with test_split_size, or eval_strategy: "no".' if "test" in key else ".",
        )


def refuse_turns_of_plain_rows(rows, assistant_only_loss: bool) -> None:
    """Refuse assistant_only_loss where the first row has no turns, as TRL does. Raises Refusal."""
    from trl import is_conversational

    if not assistant_only_loss:
        return
    first = next(iter(rows), {})
    if not is_conversational(first):
        raise refusal("ZR431", first=", ".join(first))


def not_loaded(named: list[str], error: Exception) -> Refusal:
    """The refusal for data that the datasets library cannot load."""
    offline = os.environ.get("HF_HUB_OFFLINE") == "1" or not is_local(named[0])
    fix = "Check the path." if not offline else "zero-recipes fetch RECIPE.yaml downloads it once; then start again."
    return refusal("ZR506", named=", ".join(named), error=first_line(error), fix=fix)


def is_path(name: str | None) -> bool:
    """Whether only a path can be meant."""
    return str(name).startswith((".", "/"))


def is_local(name: str) -> bool:
    return Path(name).exists() or name in ("json", "csv", "parquet", "text")
