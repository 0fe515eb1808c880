"""Cases of tests/helpers/group.py for this folder; arguments and results are JSON."""

from unittest import mock

import torch
from transformers import AutoModelForCausalLM

import run_sft
from tests.helpers import equivalence_reference
from tests.helpers.cases import train
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows
from zero_recipes.training import token_loss


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


def train_with_repeated_rows(argv: list[str]) -> dict:
    """`train`, with the loss of the rows that accelerate repeats left in place."""
    with mock.patch.object(token_loss, "without_loss", lambda *_: None):
        return train(argv)
