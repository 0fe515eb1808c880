"""The words of run_sft.py's command line that are not the recipe's."""

from pathlib import Path
from unittest import mock

import pytest

from zero_recipes.config.recipe import split_command_line


@pytest.mark.parametrize(
    ("words", "environment", "rank"),
    [
        (["--local_rank=3"], {}, "3"),
        (["--local-rank", "3"], {}, "3"),
        (["--local_rank", "3"], {"LOCAL_RANK": "1"}, "1"),
    ],
)
def test_the_deepspeed_launchers_local_rank_goes_to_the_environment(words, environment, rank):
    """It passes one to each process; the launcher's own environment counts more."""
    with mock.patch.dict("os.environ", environment, clear=True) as left:
        argv = [*words, "r.yaml", "--traceback", "--max_steps", "2"]
        assert split_command_line(argv) == (Path("r.yaml"), ["--max_steps", "2"])
        assert left["LOCAL_RANK"] == rank
