"""Offloaded AdamW after a resume."""

from tests.helpers import cpu_adam_cases


def test_offloaded_adam_goes_on_to_the_last_bit(one):
    assert one.run(cpu_adam_cases.gone_on, repeats=True) == [True]


def test_and_would_not_without_its_steps(one):
    """Then engine/faults/cpu_adam_after_resume.py is no longer needed."""
    assert one.run(cpu_adam_cases.gone_on, repeats=False) == [False]
