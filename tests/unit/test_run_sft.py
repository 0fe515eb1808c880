"""The words of run_sft.py's command line that are not the recipe's."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from zero_recipes.config.recipe import split_command_line


@pytest.mark.parametrize("words", [["--local_rank=3"], ["--local-rank", "3"], ["--local_rank", "3"]])
def test_the_deepspeed_launchers_local_rank_goes_to_the_environment(words):
    """It passes one to each process; the overrides are what is left."""
    with mock.patch.dict("os.environ", clear=True) as environment:
        assert split_command_line([*words, "r.yaml", "--max_steps", "2"]) == (Path("r.yaml"), ["--max_steps", "2"])
        assert environment["LOCAL_RANK"] == "3"


def test_the_launchers_own_environment_counts_more():
    with mock.patch.dict("os.environ", {"LOCAL_RANK": "1"}, clear=True) as environment:
        assert split_command_line(["r.yaml", "--traceback", "--local_rank=3"]) == (Path("r.yaml"), [])
        assert environment["LOCAL_RANK"] == "1"
