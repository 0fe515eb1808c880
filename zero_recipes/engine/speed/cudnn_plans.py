"""On Hopper each batch of a new shape waits for cuDNN, which builds a plan for its attention.

torch takes cuDNN's attention first. Packs and padded batches have a new shape in each step.

Library: torch 2.13, aten/src/ATen/native/cudnn/MHA.cpp.
Upstream: none found; the same in another project: modelscope/FunASR#3704.
Here: sdpa takes another kernel, unless the recipe asks for cuDNN's.
"""

import torch


def allow_cudnn(device: str, wanted: bool) -> None:
    """Say whether sdpa may take cuDNN's attention on CUDA. For the whole process; the last call counts."""
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(wanted)
