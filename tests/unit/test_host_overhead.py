"""What the libraries do in every step that need be done once."""

import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM
from trl import SFTConfig

from tests.helpers.tiny import ROOT, llama_config
from zero_recipes.training.token_loss import TokenMetrics
from zero_recipes.training.trainer import ZeroSFTTrainer


@pytest.mark.parametrize("packed, loss_type", [(False, "nll"), (True, "nll"), (False, "dft")])
def test_the_loss_and_the_log_are_trls_without_a_gather_a_micro_batch(tmp_path, monkeypatch, packed, loss_type):
    draw, trainer = random.Random(f"{packed}{loss_type}"), made(tmp_path, loss_type)
    model = trainer.model
    gathered, gather = [], trainer.accelerator.gather
    monkeypatch.setattr(trainer.accelerator, "gather", lambda tensor: gathered.append(1) or gather(tensor))
    batches = [batch(draw, packed) for _ in range(5)]
    model.train()
    found = {}
    for when in ("micro_batch", "logging_steps"):
        trainer.token_metrics, trainer._total_train_tokens, before = TokenMetrics(trainer, when), 0, len(gathered)
        losses = [trainer.compute_loss(model, dict(each), num_items_in_batch=torch.tensor(11)) for each in batches]
        losses.append(trainer.compute_loss(model, dict(batches[0])))  # without a count: the mean of its own tokens
        waited = len(gathered) - before
        trainer.log({})
        log = {key: value for key, value in trainer.state.log_history[-1].items() if key != "epoch"}
        found[when] = [loss.item() for loss in losses], log, waited
    trl, ours = found["micro_batch"], found["logging_steps"]
    assert ours[0] == trl[0] and ours[1] == pytest.approx(trl[1], rel=1e-6)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(ours[1])
    assert (trl[2], ours[2]) == (24, 24 if loss_type == "dft" else 0)


def made(folder: Path, loss_type: str = "nll") -> ZeroSFTTrainer:
    torch.manual_seed(7)
    model = LlamaForCausalLM(llama_config(num_hidden_layers=1))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    args = SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], loss_type=loss_type)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]})
    return ZeroSFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)


def logged(trainer: ZeroSFTTrainer) -> dict:
    trainer.log({})
    return trainer.state.log_history[-1]


def test_an_evaluations_accuracy_is_a_mean_over_tokens_not_over_batches(tmp_path):
    trainer, draw = made(tmp_path), random.Random(3)
    trainer.model.eval()
    right = supervised = 0
    for each in (batch(draw, packed=False) for _ in range(5)):
        with torch.no_grad():
            trainer.compute_loss(trainer.model, dict(each))
            best = trainer.model(each["input_ids"], attention_mask=each["attention_mask"]).logits[:, :-1].argmax(-1)
        wanted = each["labels"][:, 1:]
        right += int((best == wanted).sum())
        supervised += int((wanted != -100).sum())
    assert logged(trainer)["eval_mean_token_accuracy"] == pytest.approx(right / supervised)


def test_tokens_of_repeated_rows_are_not_logged(tmp_path):
    trainer, each = made(tmp_path), batch(random.Random(5), packed=False)
    repeated = torch.zeros_like(each["labels"], dtype=torch.bool)
    repeated[-1] = True
    trainer.token_metrics.repeated = repeated
    trainer.compute_loss(trainer.model.train(), dict(each))
    assert logged(trainer)["num_tokens"] == int(each["attention_mask"][:-1].sum())


def batch(draw: random.Random, packed: bool) -> dict[str, torch.Tensor]:
    """Rows of any length with padding, or one line without a mask; in one of five no token has a loss."""
    shape = (1, draw.randint(5, 30)) if packed else (draw.randint(1, 4), draw.randint(5, 30))
    ids = torch.randint(5, 1000, shape)
    labels = ids.masked_fill(torch.rand(shape) < draw.choice([0.3, 0.5, 0.7, 0.9, 1.0]), -100)
    if packed:
        return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(shape[1]).unsqueeze(0)}
    mask = torch.arange(shape[1]) < torch.randint(3, shape[1] + 1, (shape[0], 1))
    return {"input_ids": ids, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}
