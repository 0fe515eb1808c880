"""The simulation's worker with other programs' loss heads: python -m benchmarks.planners.other_trainers DEVICE

TRL 1.16 computes the loss in chunks and never holds the logits whole. The programs behind most published numbers did
hold them. Which of these a program did stands in its rows as `head`, from the source of the version that was used:

- upcast: logits in fp32 beside those in 16 bits: transformers from 4.50 (loss/loss_utils.py)
- upcast_shifted: a contiguous copy without the last position beside both: transformers 4.46 to 4.49
- early_shifted: logits in fp32 instead of those in 16 bits, and such a copy: transformers up to 4.45 (modeling_*.py)
- shifted: a copy in 16 bits, without the upcast: Qwen's own model code of 2023
"""

import sys

from benchmarks.planners.court import HEAD, KEPT
from zero_recipes.tools.plan.simulator import parent

# What is alive for each logit at the end of forward, log-softmax included; for rows that only formulas answer.
BYTES_PER_LOGIT = {"upcast": 10, "upcast_shifted": 14, "early_shifted": 12, "shifted": 12}


def main() -> None:
    load = parent.load_worker
    parent.load_worker = lambda device: with_heads(load(device))
    parent.main(sys.argv[1])


def with_heads(worker):
    stand_ins = worker.stand_ins
    replace = stand_ins.replace_parts_of_libraries  # rows of the court are of full length: their batches have no mask
    stand_ins.replace_parts_of_libraries = lambda on_gpu, _, *rest: replace(on_gpu, True, *rest)
    build = worker._trainer  # noqa: SLF001 (the one place where a simulated trainer is built)
    worker._trainer = lambda job, *rest: with_head(build, job, *rest)  # noqa: SLF001
    return worker


def with_head(build, job, *rest):
    """The trainer with the row's loss head. Each task has a process of its own: what is replaced stays replaced."""
    head = job.config.get(HEAD, "fused")
    if job.config.get(KEPT):
        keep_inputs_of_packed_products()
    if head != "fused":
        from trl.trainer import sft_trainer

        sft_trainer.add_fused_lm_head = lambda *_, **__: None
        sft_trainer.SFTTrainer.compute_loss = lambda _, *arguments, **keywords: full_loss(head, *arguments, **keywords)
    return build(job, *rest)


def keep_inputs_of_packed_products() -> None:
    """bitsandbytes 0.42 (autograd/_functions.py, MatMul4Bit: `ctx.tensors = (A, B)`) held them for backward, unused."""
    from bitsandbytes.autograd import _functions  # noqa: PLC2701

    forward = _functions.MatMul4Bit.forward

    def keeping(ctx, inputs, *rest):
        ctx.kept = inputs
        return forward(ctx, inputs, *rest)

    _functions.MatMul4Bit.forward = staticmethod(keeping)


def full_loss(head, model, inputs, return_outputs=False, num_items_in_batch=None):
    """What stays named stays alive, as in the function that each branch stands for."""
    import torch

    labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    outputs = model(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False)
    logits = outputs["logits"]
    if head.startswith("early"):
        outputs["logits"] = logits = logits.float()
    full = logits.float() if head.startswith("upcast") else logits
    taken = full
    if head.endswith("shifted"):
        taken, labels = full[..., :-1, :].contiguous(), labels[..., :-1].contiguous()
    loss = torch.nn.functional.cross_entropy(taken.view(-1, taken.shape[-1]), labels.view(-1))
    return (loss, outputs) if return_outputs else loss


if __name__ == "__main__":
    main()
