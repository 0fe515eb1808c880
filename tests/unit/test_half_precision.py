"""Cards without bf16, fp16's skipped steps, and the scale that keeps quantized gradients within fp16."""

from __future__ import annotations

import random

import pytest
import torch

from zero_recipes.checks import gpus
from zero_recipes.libs.patches import scale_for_fp16


@pytest.mark.parametrize("seed", range(40))
def test_the_scale_keeps_values_and_their_sum_within_fp16(seed):
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4, 6, 8, 16, 24, 256, 1000])
    dtype = draw.choice([torch.bfloat16, torch.float32])
    values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    given = (values * 10 ** draw.uniform(-20, 36)).clamp(-3e38, 3e38).to(dtype)
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


def test_bf16_on_a_card_without_it_is_named(monkeypatch):
    cards = [((8, 0), "A100"), ((7, 5), "Tesla T4"), ((7, 0), "V100")]
    monkeypatch.setattr("torch.version.cuda", "12.6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(cards))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda number: cards[number][0])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: cards[number][1])
    (finding,) = gpus.bf16_findings("cuda", "bf16")
    assert (finding.code, finding.level) == ("ZR272", "error")
    assert "GPU 1 (Tesla T4), of compute capability 7.5" in finding.what and "-fp16.yaml" in finding.fix
    for device, precision in (("cuda", "fp16"), ("cuda", "fp32"), ("cpu", "bf16")):
        assert not list(gpus.bf16_findings(device, precision))
    cards[1:] = [((9, 0), "H100")]
    assert not list(gpus.bf16_findings("cuda", "bf16"))
    monkeypatch.setattr("torch.version.cuda", None)  # ROCm numbers its cards otherwise
    cards[0] = ((6, 0), "gfx")
    assert not list(gpus.bf16_findings("cuda", "bf16"))
