"""Claims of docs/claims.md that only a DeepSpeed engine on two processes can show."""

from __future__ import annotations

import pytest

from tests.helpers.group import Group


@pytest.mark.parametrize("stage", [2, 3])
def test_a_bucket_counts_elements(two, stage):
    """reduce_bucket_size in bf16 takes twice as many bytes."""
    assert two.run("claim_cases.bucket_bytes", stage=stage, elements=50_000) == [2 * 50_000] * 2


def test_saving_on_rank_0_alone_hangs(tmp_path):
    """Until the timeout of its process group, shortened here: nothing of the checkpoint is written."""
    pair = Group(2)
    try:
        alone, _ = pair.run("claim_cases.save_alone", folder=str(tmp_path / "checkpoint"))
    finally:
        pair.kill()
    assert "imed out" in alone and alone.endswith(" []")
