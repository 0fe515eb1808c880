"""Training after `generate` at stage 3 ends with "Cannot partition a param in flight" or a tensor of size 0.

DeepSpeed prefetches parameters in the order of the last forward pass. Generation passes through the LM head's module.
TRL's fused LM head gathers the weight itself, and finds it in flight. TRL forgets the order too, in models/utils.py
`add_hooks`, but only where it gathers the whole model for generation.

Library: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py; TRL 1.16, trainer/utils.py
    (`add_fused_lm_head`).
Upstream: none found for the fused head; the same error: deepspeedai/DeepSpeed#3068.
Here: the order is forgotten after each generation. It is recorded anew from the second step on.

See it: two processes, a model, and rows of text

    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(deepspeed="zero3.json", max_steps=4, per_device_train_batch_size=1)
    trainer = SFTTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=rows)


    class Answer(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, processing_class=None, **_):
            prompt = processing_class("Hello", return_tensors="pt").to(model.device)
            model.generate(**prompt, max_new_tokens=4, synced_gpus=True)


    trainer.add_callback(Answer())
    trainer.train()
"""

from zero_recipes.engine.deepspeed import is_stage_3


def forget_trace_of_generation(engine) -> None:
    """Drop the order of modules that DeepSpeed recorded while the model generated. Nothing below stage 3.

    The first step after it lacks the head in its order: DeepSpeed says "tracing error" there for a LoRA.
    """
    optimizer = getattr(engine, "optimizer", None)
    if is_stage_3(optimizer):
        coordinator = optimizer.parameter_offload.param_coordinator
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        coordinator.reset_step()
