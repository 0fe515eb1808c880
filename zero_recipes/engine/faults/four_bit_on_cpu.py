"""QLoRA on CPUs with AVX512-BF16: after an evaluation or a sample the loss no longer falls.

The first forward pass in evaluation mode packs 4-bit weights anew, for good. bitsandbytes then multiplies without
autograd in training too: no gradient passes a frozen layer, with a mere warning.

Library: bitsandbytes 0.50.2, nn/modules.py (`Linear4bit.support_avx512bf16_for_cpu`), autograd/_functions.py
    (`matmul_4bit`).
Upstream: none found; the packed layout also breaks `to(device)`: bitsandbytes-foundation/bitsandbytes#2078.
Here: 4-bit layers keep the layout that can be trained.

See it: a CPU with AVX512-BF16

    import torch
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    rows = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    layer.eval()(rows.detach())
    assert not layer.train()(rows).requires_grad
"""

import torch


def keep_4bit_layout(model: torch.nn.Module) -> None:
    """Keep the model's 4-bit layers in a layout that can be trained, on every CPU."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
