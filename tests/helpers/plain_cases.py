"""Cases of tests/helpers/group.py: runs of run_sft.py that are observed, to be compared with plain torch."""

import run_sft
from zero_recipes.core.findings import Refusal
from zero_recipes.tools.rehearse import observed


def observe(argv: list[str]) -> list[str]:
    """The codes of what refuses the run; none where it was trained to its end."""
    try:
        run = run_sft.read_run(argv)
    except Refusal as refused:
        return refused.codes
    with observed.observing():
        try:
            run_sft.train(run)
        except Refusal as refused:
            return refused.codes
    return []
