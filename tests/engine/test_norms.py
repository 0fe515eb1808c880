"""Norms are computed at once. At stages 1 and 2 they alone find what is not finite, as at stage 3."""

import pytest

from tests.helpers import norm_cases
from tests.helpers.seeded import grid


@pytest.mark.parametrize("stage", [grid(1), 2, 3])
def test_the_norm_alone_skips_the_same_steps_and_has_the_same_value(two, stage):
    """One rank's gradient is infinite, then NaN. Fails when DeepSpeed's own step costs no more: then remove
    speed/norms.py's part for that stage."""
    ranks = two.run(norm_cases.patched_and_not, stage=stage)
    for case, (own, ours) in ranks[0].items():
        assert [step["skipped"] for step in own] == [step in norm_cases.BAD for step in range(norm_cases.STEPS)], case
        for before, now in zip(own, ours, strict=True):
            operations, read = ((before.pop(key), now.pop(key)) for key in ("operations", "read"))
            assert now == before, case
            if not now["skipped"]:
                assert operations[1] < operations[0], case
                if stage == 3:
                    assert read[0] == read[1]
                else:
                    assert read[1] == 1 and read[0] == (1 if case.startswith("fp32") else 4), "whether to skip"
        assert [step["skipped"] for step in ranks[1][case][1]] == [step["skipped"] for step in own], case


def test_a_rank_that_has_padding_alone_trains_on(two):
    """engine/speed/gradient_copies.py: torch copies no empty lists."""
    plain, patched = (two.run(norm_cases.trained_scalar, is_patched=is_patched) for is_patched in (False, True))
    assert patched == plain and patched[0] == patched[1] and len(set(patched[0])) == 3
