"""Whether the data that a recipe names is there, with the splits that it names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zero_recipes.core.errors import Refusal, first_line


def refuse_absent_data(named: list[str | None]) -> None:
    """Refuse data that is not named, and paths where nothing is. Raises Refusal."""
    if not any(named):
        raise Refusal(
            "ZR504",
            "the recipe names no data",
            "Neither `dataset_name` nor `datasets` is set.",
            "Add e.g. dataset_name: tatsu-lab/alpaca",
        )
    for name in named:
        if is_path(name) and not Path(str(name)).exists():
            raise Refusal(
                "ZR505",
                f"the data {name} cannot be loaded",
                f"There is no such file or folder; paths are relative to the working directory, {Path.cwd()}.",
                "Check the path.",
            )


def refuse_missing_split(known: Iterable[str], name: str, key: str) -> None:
    """Refuse a split that the data does not have. `key`: the recipe's, which names it. Raises Refusal."""
    if name not in known:
        raise Refusal(
            "ZR507",
            f"the data set has no split {name!r}; it has {', '.join(known)}",
            f"The recipe's {key} names it" + (" (eval_strategy needs one)." if "test" in key else "."),
            f"Set {key} to one of them"
            + (', use `datasets:` with test_split_size, or eval_strategy: "no".' if "test" in key else "."),
        )


def refuse_turns_of_plain_rows(rows, assistant_only_loss: bool) -> None:
    """Refuse assistant_only_loss where the first row has no turns, as TRL does. Raises Refusal."""
    from trl import is_conversational

    if not assistant_only_loss:
        return
    first = next(iter(rows), {})
    if not is_conversational(first):
        raise Refusal(
            "ZR431",
            f"assistant_only_loss, but the rows have no turns: their columns are {', '.join(first)}",
            "Plain text has no assistant whose words could be picked out: TRL (trainer/sft_trainer.py) stops on it, "
            "once the model has been loaded.",
            "Remove assistant_only_loss, or name data with messages.",
        )


def not_loaded(named: list[str], error: Exception) -> Refusal:
    """The refusal for data that the datasets library cannot load."""
    offline = os.environ.get("HF_HUB_OFFLINE") == "1" or not is_local(named[0])
    fix = "Check the path." if not offline else "zero-recipes fetch RECIPE.yaml downloads it once; then start again."
    return Refusal("ZR506", f"the data {', '.join(named)} cannot be loaded", first_line(error), fix)


def is_path(name: str | None) -> bool:
    """Whether only a path can be meant."""
    return str(name).startswith((".", "/"))


def is_local(name: str) -> bool:
    return Path(name).exists() or name in ("json", "csv", "parquet", "text")
