"""16-bit matrix products on a CPU without instructions for them, in a process of its own."""

import subprocess
import sys

import pytest

from zero_recipes.engine.speed import cpu_products

PRODUCTS = """
import torch
from zero_recipes.engine.speed import cpu_products

cpu_products.slow_dtypes = lambda: frozenset([torch.bfloat16])  # on any CPU
torch.manual_seed(0)

def products(dtype):
    a, b, c = torch.randn(24, 40), torch.randn(40, 16), torch.randn(16)
    many = torch.randn(3, 8, 24)
    operands = [each.to(dtype).requires_grad_() for each in (a, b, c, many)]
    a, b, c, many = operands
    found = [a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.bmm(many, many.mT)]
    found.append(torch.baddbmm(found[2], many, many.mT, beta=0.5))
    sum(product.float().square().sum() for product in found).backward()
    tiles = torch.full((24, 20), torch.nan, dtype=dtype)
    with torch.no_grad():
        found.append(torch.mm(a, b, out=tiles[:, :16]))
    assert tiles[:, 16:].isnan().all()
    return [product.detach() for product in found] + [operand.grad for operand in operands]

def both(dtype):
    torch.manual_seed(1)
    return products(dtype)

before = {dtype: both(dtype) for dtype in (torch.float32, torch.bfloat16)}
cpu_products.multiply_in_fp32()
for dtype, expected in before.items():
    for old, new in zip(expected, both(dtype), strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        if dtype == torch.float32:
            assert torch.equal(old, new)
        else:  # one rounding each, of sums in another order
            torch.testing.assert_close(old.float(), new.float(), rtol=2**-6, atol=2**-5 * old.abs().max().item())

a, b = torch.randn(24, 40), torch.randn(40, 16)
for one, other in ((a, b.bfloat16()), (a.bfloat16(), b)):
    for multiply in (torch.mm, lambda one, other: torch.mm(one, other, out=torch.empty(24, 16).bfloat16())):
        try:
            multiply(one, other)
        except RuntimeError as error:
            assert "dtype" in str(error), error
        else:
            raise AssertionError("a mixed product was computed")
"""


def test_products_are_the_same_but_for_the_order_of_sums():
    ended = subprocess.run([sys.executable, "-W", "error", "-c", PRODUCTS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_cpu_with_the_instructions_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu_products, "slow_dtypes", frozenset)
    monkeypatch.setattr(cpu_products, "_kernel", lambda *_: pytest.fail("an operator was replaced"))
    cpu_products.multiply_in_fp32.__wrapped__()
