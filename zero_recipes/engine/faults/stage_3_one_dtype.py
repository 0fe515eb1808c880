"""LoRA with `modules_to_save` or new tokens at stage 3 in bf16 ends with a bare AssertionError in `defragment`.

DeepSpeed lays all that trains into one buffer and stops where dtypes differ. PEFT keeps LoRA's matrices in fp32; the
modules that train whole, and new tokens, are copies of what zero.Init has made 16 bits. At stages 1 and 2 the engine
casts all of them.

Library: DeepSpeed 0.19.8, runtime/zero/utils.py (`defragment`).
Upstream: none found for adapters; the same assertion: hiyouga/LlamaFactory#2774.
Here: the fp32 matrices become 16 bits. The fp32 masters stay exact: they are set from the values of before.

See it: one CPU

    import torch
    from deepspeed.runtime.zero.utils import defragment

    try:
        defragment([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])
        raise SystemExit("no fault")
    except AssertionError as error:
        print(repr(error))
"""

import torch

from zero_recipes.engine.deepspeed import is_partitioned


def one_dtype_of_what_trains(model: torch.nn.Module) -> None:
    """Cast what trains in fp32 to 16 bits where other trained parameters have 16 bits. For stage 3 in 16 bits."""
    trained = [p for p in model.parameters() if p.requires_grad]
    in_16_bits = {p.dtype for p in trained} - {torch.float32}
    if len(in_16_bits) != 1:
        return
    (dtype,) = in_16_bits
    for p in trained:
        if not is_partitioned(p):
            p.data = p.data.to(dtype)
