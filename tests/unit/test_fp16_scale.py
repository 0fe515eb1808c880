"""The scale that keeps quantized gradients within fp16."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from zero_recipes.libs.patches import scale_for_fp16


@settings(deadline=None, max_examples=40)
@given(
    seed=draw.integers(0, 2**31),
    world=draw.sampled_from([2, 3, 4, 6, 8, 16, 24, 256, 1000]),
    dtype=draw.sampled_from([torch.bfloat16, torch.float32]),
    power=draw.floats(-20, 36),
)
def test_the_scale_keeps_values_and_their_sum_within_fp16(seed, world, dtype, power):
    values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    given = (values * 10**power).clamp(-3e38, 3e38).to(dtype)
    scale = scale_for_fp16(given.abs().max().float(), world, dtype)
    scaled = (given * scale.to(dtype)).half()
    assert torch.frexp(scale).mantissa.item() == 0.5, "a power of two: scaling rounds nothing"
    assert scaled.double().abs().max() * world <= 2**15
    back, largest = scaled.double() / scale.double(), given.double().abs().max()
    assert torch.allclose(back, given.double(), rtol=2**-10, atol=float(largest) * 2**-24 * world)


def test_the_scale_of_nothing_of_fp16_and_of_what_is_not_finite():
    assert scale_for_fp16(torch.tensor(0.0), 4, torch.bfloat16).isfinite()
    assert scale_for_fp16(torch.tensor(torch.inf), 4, torch.bfloat16) == 1
    for largest in (6e-8, 1e-3, 65504.0):  # the scale itself must be a number of fp16
        assert 0 < scale_for_fp16(torch.tensor(largest), 8, torch.float16).half() <= 2**15
