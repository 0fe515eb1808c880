"""`torch_compile` at stage 3 with TRL: "one of the variables needed ... has been modified by an inplace operation".

A model that is compiled as a whole has released the LM head's weight when TRL's fused head reads it in the backward
pass.

Library: TRL 1.16, kernels/chunked_logprob.py; DeepSpeed 0.19.8, runtime/zero/parameter_offload.py.
Upstream: none found.
Here: accelerate compiles each decoder layer, not the model as a whole. In November 2026 that was not enough on a CPU:
    the grid's `test_stage_3_is_compiled_by_layers` ends with the same error.

See it: one process, a model, and rows of text

    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(deepspeed="zero3.json", torch_compile=True, torch_compile_backend="aot_eager", max_steps=2)
    SFTTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=rows).train()
"""

import os


def apply() -> None:
    """Have accelerate compile by layers. Call it before there is an Accelerator."""
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
