"""Samples of Gemma 4 E4B at stage 3 with a LoRA adapter: "IndexError: too many indices for tensor of dimension 1".

Its model reads a row of the embedding's weight outside of the embedding's module. DeepSpeed gathers a weight that is
read so, but only between the beginning and the end of its engine's own forward pass. `generate` calls the model within,
and finds a tensor of size 0.

Library: DeepSpeed 0.19.8, runtime/engine.py (`_forward_prologue`), runtime/zero/parameter_offload.py
    (`ZeROOrderedDict`); transformers 5.23, models/gemma4/modeling_gemma4.py (`Gemma4Model.forward`).
Upstream: none found.
Here: the weights are gathered where they are read while the model answers samples, too.

See it: two processes, a model of the type gemma4 with embeddings of each layer, and rows of text

    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(deepspeed="zero3.json", max_steps=1, per_device_train_batch_size=1)
    trainer = SFTTrainer("google/gemma-4-E4B-it", args=args, train_dataset=rows, peft_config=LoraConfig())
    trainer.train()
    prompt = trainer.processing_class("Hello", return_tensors="pt").to(trainer.model.device)
    try:
        trainer.model.generate(**prompt, max_new_tokens=4, synced_gpus=True)
        raise SystemExit("the fault is gone")
    except IndexError:
        pass
"""

import torch


def gather_where_read(model: torch.nn.Module, is_answering: bool) -> None:
    """Gather a weight that another module reads, or no longer. Nothing below stage 3.

    Args:
        model: the trainer's, which generates without the engine around it.
        is_answering: whether it is about to generate; False after it has.
    """
    for module in model.modules():
        if hasattr(module._parameters, "_in_forward"):  # DeepSpeed's own dictionary
            module._parameters._in_forward = is_answering
