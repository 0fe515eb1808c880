"""Which attention a run takes, by device, precision and sizes. No GPU has run what is for CUDA here."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_recipes.engine import attention
from zero_recipes.engine.speed.cudnn_plans import allow_cudnn


@pytest.fixture
def cudnn():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnns_attention_is_switched_off_on_cuda_alone(cudnn):
    allow_cudnn("cpu", False)
    assert cudnn()
    allow_cudnn("cuda", False)
    assert not cudnn()
    allow_cudnn("cuda", True)
    assert cudnn()


@pytest.mark.parametrize(
    "device, precision, capability, wanted",
    [
        ("cpu", "fp32", None, True),
        ("cuda", "bf16", (9, 0), True),
        ("cuda", "fp16", (8, 0), True),
        ("cuda", "fp16", (7, 5), False),
        ("cuda", "fp32", (9, 0), False),
    ],
)
def test_packs_go_row_by_row_where_a_kernel_does_that(monkeypatch, device, precision, capability, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert attention.has_row_kernel(device, precision) == wanted


def test_the_kernel_takes_what_flash_attention_can_train():
    def takes(device="cuda", dtype=torch.bfloat16, size=64, value_size=64, dropout=0.0):
        return attention.kernel_takes(device, dtype, size, value_size, dropout)

    assert takes() and takes(dtype=torch.float16) and takes(size=256, value_size=256)
    assert not takes(device="cpu")
    assert not takes(dtype=torch.float32)
    assert not takes(dropout=0.1)
    assert not takes(size=192, value_size=128)
    for size in (20, 200, 224, 264):
        assert not takes(size=size, value_size=size)


def test_a_pack_that_does_not_say_where_its_rows_begin_is_named():
    row = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        attention._by_row(None, row, row, row, torch.empty(1, 1, 0, 0, dtype=torch.bool))


def test_attention_is_computed_in_the_dtype_of_autocast():
    tensor = torch.zeros(1)
    assert attention.computed_in(tensor) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.computed_in(tensor) == torch.bfloat16


@pytest.mark.parametrize("window, keys", [(0, 2), (3, 1)])
def test_torchs_kernel_takes_the_arguments_and_has_a_gradient(window, keys):
    """Without numbers: torch has no kernel for CPUs, but knows the shapes."""
    with FakeTensorMode():
        query = torch.zeros(1, 2, 8, 16, requires_grad=True)
        key, value = (torch.zeros(1, keys, 8, 16, requires_grad=True) for _ in range(2))
        boundaries = torch.tensor([0, 5, 8], dtype=torch.int32)
        with torch.autocast("cpu", torch.bfloat16):
            output = attention._by_kernel(query, key, value, boundaries, 5, window, 0.25)
        assert output.shape == (1, 8, 2, 16) and output.dtype == torch.bfloat16
        output.sum().backward()
        assert [tensor.grad.shape for tensor in (query, key, value)] == [query.shape, key.shape, value.shape]
