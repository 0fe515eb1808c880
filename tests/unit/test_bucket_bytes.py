"""The plan's buckets by DeepSpeed's source: what stands beside the model states while gradients are reduced."""

from __future__ import annotations

import pytest

from tests.helpers.plan_jobs import job
from zero_recipes.plan.formulas import bucket_bytes, computed_width, shape_of

BUCKET = 1_000_000


def bytes_of(stage: int, **zero) -> tuple[float, int, object]:
    """(bucket_bytes in elements, vocabulary x hidden, shape) of a job on two ranks."""
    made = job(f"zero{stage}")
    config = dict(made.ds_config) | {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "overlap_comm": False} | zero
    }
    made = type(made)(**{**vars(made), "ds_config": config})
    shape = shape_of(made.config, made.settings)
    return bucket_bytes(made, shape) / computed_width(made), shape.vocabulary * shape.hidden, shape


@pytest.mark.parametrize("stage", [1, 2])
def test_overlap_comm_reduces_one_bucket_while_it_fills_another(stage):
    assert bytes_of(stage)[0] == BUCKET
    assert bytes_of(stage, overlap_comm=True)[0] == 2 * BUCKET


def test_stage_3_gathers_what_may_live_but_never_less_than_its_largest_tensor():
    elements, largest, shape = bytes_of(3, stage3_max_live_parameters=0)
    assert elements == BUCKET + largest < BUCKET + shape.parameters
    live = 2 * largest
    assert live < shape.parameters and bytes_of(3, stage3_max_live_parameters=live)[0] == BUCKET + live
    assert bytes_of(3, stage3_max_live_parameters=10**12)[0] == BUCKET + shape.parameters
