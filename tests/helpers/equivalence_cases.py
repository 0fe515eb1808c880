"""Cases of tests/helpers/group.py for this folder; arguments and results are JSON."""

import contextlib
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import get_peft_config

import run_sft
from tests.helpers import equivalence_reference
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows
from zero_recipes.training import token_loss
from zero_recipes.training import trainer as trainers


def prepared(argv: list[str]) -> tuple:
    """(the recipe's values, its ModelConfig, training rows, evaluation rows) as run_sft.py would have them."""
    run = run_sft.prepare(argv)
    _, training_args, model_args, _ = run.trl_arguments()
    rows = prepare_rows(run.settings, training_args, load_tokenizer(run.settings))
    return run.settings.as_dict(), model_args, list(rows.train), list(rows.evaluation or ())


def train_plainly(argv: list[str], folder: str) -> dict:
    """The reference run of a recipe; its model is saved in `folder`."""
    values, model_args, rows, _ = prepared(argv)
    model, losses = equivalence_reference.train(model_args.model_name_or_path, rows, values)
    model.save_pretrained(folder)
    return {"losses": losses}


def evaluate_plainly(argv: list[str]) -> float:
    """The token-weighted loss of the model, before training, over the whole evaluation split."""
    _, model_args, _, rows = prepared(argv)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    with torch.no_grad():
        return float(equivalence_reference.token_weighted(equivalence_reference.token_losses(model, rows)))


def gradients_of_the_first_step(argv: list[str]) -> dict[str, list[str]]:
    """Names of the tensors by their gradient in a plain model's first step: some, zero, or none (frozen)."""
    values, model_args, rows, _ = prepared(argv)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=torch.float32)
    adapter = get_peft_config(model_args)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    batch = next(equivalence_reference.global_batches(len(rows), values["global_batch_size"], values["data_seed"]))
    equivalence_reference.token_weighted(equivalence_reference.token_losses(model, [rows[i] for i in batch])).backward()
    found: dict[str, list[str]] = {"some": [], "zero": [], "none": []}
    for name, p in model.named_parameters():
        found["none" if p.grad is None else "some" if p.grad.any() else "zero"].append(name)
    return found


class FirstStep(TrainerCallback):
    """Which tensors the first step changes."""

    def __init__(self):
        self.changed: list[str] = []
        self.unchanged: list[str] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.before = whole_weights(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            for name, after in whole_weights(model).items():
                (self.unchanged if torch.equal(after, self.before[name]) else self.changed).append(name)


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered where ZeRO stage 3 has partitioned them. A collective."""
    import deepspeed

    copies = {}
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters(p) if hasattr(p, "ds_id") else contextlib.nullcontext():
            copies[name.removeprefix("module.")] = p.detach().cpu().clone()
    return copies


def train_watched(argv: list[str]) -> dict:
    """`train`, and which tensors its first step changed."""
    from tests.helpers.cases import train

    watcher, original = FirstStep(), trainers.ZeroSFTTrainer.train

    def watched(self, *arguments, **keywords):
        self.add_callback(watcher)
        return original(self, *arguments, **keywords)

    with mock.patch.object(trainers.ZeroSFTTrainer, "train", watched):
        return train(argv) | {"changed": watcher.changed, "unchanged": watcher.unchanged}


def train_with_repeated_rows(argv: list[str]) -> dict:
    """`train_watched`, with the loss of the rows that accelerate repeats left in place."""
    with mock.patch.object(token_loss, "without_loss", lambda *_: None):
        return train_watched(argv)
