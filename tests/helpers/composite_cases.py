"""Cases of tests/engine/test_composite.py: whole runs, and what their trained model answers."""

import torch

import run_sft
from tests.helpers.composites import TEXT
from zero_recipes.engine import fsdp


def ids() -> torch.Tensor:
    """A row of text, (1, 12)."""
    return torch.arange(2, 14).reshape(1, -1) * 7 % TEXT["vocab_size"]


def logits_of_trained(argv: list[str]) -> dict:
    """One run, the logits of the last token of `ids`, and how many parameters the optimizer has."""
    trainer = run_sft.train(run_sft.read_run(argv))
    trainer.accelerator.wait_for_everyone()
    model = trainer.model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids(), use_cache=False).logits[0, -1].float().tolist()
    fsdp.reshard_model(trainer.model)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return {"logits": logits, "trained": trained, "loss": trainer.stage_metrics.losses_so_far()}
