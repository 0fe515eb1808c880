"""Choose the demo's learning rate and number of steps on the validation set; then look at the test set once.

    python -m tiny_world.choose grid       # writes hyperparameters.json, from training and validation rows only
    python -m tiny_world.choose test       # adds the test figures of the choice; refuses to do it a second time

Every figure of README.md comes from hyperparameters.json.
"""

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tiny_world.pretrain import BASE
from tiny_world.tuning import (
    ROWS_PER_STEP,
    WARMUP_STEPS,
    answers,
    compare,
    reference_loss,
    shuffled_outputs,
    tune,
)
from tiny_world.world import FOLDER, Row, data_sets, exchanged_facts, instruction_rows, make_world, split_creatures

RECORD = FOLDER / "hyperparameters.json"
LEARNING_RATES = (2e-4, 5e-4, 1e-3, 2e-3)  # each tried with STEPS[0]
STEPS = (120, 80, 160)  # the others are tried with the best learning rate only
SEEDS = (0, 1, 2)
WORTH = 0.02  # gain in exact match that another number of steps must bring


def weights_digest() -> str:
    """SHA-256 of the base's weights, so that the figures can be tied to them."""
    return hashlib.sha256((BASE / "model.safetensors").read_bytes()).hexdigest()


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[Row]) -> dict[str, float]:
    """Exact match, token F1 and loss against the true references."""
    answered = answers(model, tokenizer, rows)
    return {
        **compare(answered, [row["output"] for row in rows]),
        "loss": round(reference_loss(model, tokenizer, rows), 4),
    }


def run(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    learning_rate: float,
    steps: int,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """One tuning; returns the model, for measuring in float32, and the figures of its training."""
    started = time.monotonic()
    model, losses = tune(tokenizer, rows, learning_rate, steps, seed, dtype)
    figures = {
        "learning_rate": learning_rate,
        "steps": steps,
        "seed": seed,
        "train_loss_first_step": round(losses[0], 4),
        "train_loss_last_5_steps": round(statistics.mean(losses[-5:]), 4),
        "train_seconds": round(time.monotonic() - started, 1),
    }
    return model.float(), figures


def standing(runs: list[dict[str, Any]], learning_rate: float, steps: int) -> tuple[float, float]:
    """How good a setting is: mean validation exact match over the seeds, then, for ties, minus the mean loss."""
    found = [r["validation"] for r in runs if (r["learning_rate"], r["steps"]) == (learning_rate, steps)]
    return statistics.mean(v["exact_match"] for v in found), -statistics.mean(v["loss"] for v in found)


def grid() -> dict[str, Any]:
    """Try the settings; everything here is measured on the validation set."""
    sets = data_sets(make_world())
    train, validation = sets["train"], sets["validation"]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    runs: list[dict[str, Any]] = []

    def try_setting(learning_rate: float, steps: int, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
        tried = []
        for seed in SEEDS:
            model, figures = run(tokenizer, train, learning_rate, steps, seed, dtype)
            tried.append({**figures, "validation": measure(model, tokenizer, validation)})
            print(json.dumps(tried[-1]), flush=True)
        return tried

    for learning_rate in LEARNING_RATES:
        runs += try_setting(learning_rate, STEPS[0])
    best_rate = max(LEARNING_RATES, key=lambda rate: standing(runs, rate, STEPS[0]))
    for steps in STEPS[1:]:
        runs += try_setting(best_rate, steps)
    usual = standing(runs, best_rate, STEPS[0])[0]
    best_steps = max(STEPS, key=lambda steps: standing(runs, best_rate, steps))
    if standing(runs, best_rate, best_steps)[0] < usual + WORTH:
        best_steps = STEPS[0]

    print("the choice once more in float32:", flush=True)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return {
        "fixed": {
            "rows_per_step": ROWS_PER_STEP,
            "warmup_steps": WARMUP_STEPS,
            "schedule": "cosine to zero",
            "optimizer": "AdamW, betas 0.9 and 0.999, no weight decay, gradient norm clipped to 1",
            "precision": "bfloat16 weights rounded from a float32 copy",
            "loss": "tokens of the answer and the end of text",
        },
        "base_sha256": weights_digest(),
        "rows": {label: len(rows) for label, rows in sets.items()},
        "rule": (
            f"highest mean validation exact match over seeds {list(SEEDS)} with {STEPS[0]} steps, ties by the lower "
            f"loss; another number of steps only if it gains {WORTH} or more"
        ),
        "validation_before": measure(base, tokenizer, validation),
        "runs": runs,
        "choice": {
            "learning_rate": best_rate,
            "steps": best_steps,
            "validation_exact_match_mean": round(standing(runs, best_rate, best_steps)[0], 4),
        },
        "choice_in_float32": try_setting(best_rate, best_steps, torch.float32),
        "torch": torch.__version__,
    }


def test_figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sets: dict[str, list[Row]]) -> dict:
    """Scores of one model on the test prompts against the true references and the two kinds of wrong ones."""
    true = sets["references"]
    answered = answers(model, tokenizer, true)
    figures: dict[str, Any] = {
        label: {
            **compare(answered, [row["output"] for row in rows]),
            "loss": round(reference_loss(model, tokenizer, rows), 4),
        }
        for label, rows in sets.items()
    }
    for label, wanted in (("without_input", False), ("with_input", True)):
        part = [(text, row["output"]) for text, row in zip(answered, true, strict=True) if bool(row["input"]) == wanted]
        figures[f"exact_match_{label}"] = compare(*map(list, zip(*part, strict=True)))["exact_match"]
    # Would an answer be right if it had stopped in time? Cut it after as many words as the reference has.
    cut = [" ".join(text.split()[: len(row["output"].split())]) for text, row in zip(answered, true, strict=True)]
    figures["exact_match_when_cut"] = compare(cut, [row["output"] for row in true])["exact_match"]
    figures["examples"] = [{**row, "answer": text} for text, row in list(zip(answered, true, strict=True))[:4]]
    return figures


def test(choice: dict[str, Any]) -> dict[str, Any]:
    """The test figures: the base, the choice with every seed, and the choice trained on shuffled answers."""
    world = make_world()
    train, true = (data_sets(world)[label] for label in ("train", "test"))
    names = split_creatures(world)["test"]
    sets = {
        "references": true,
        "references_of_other_rows": shuffled_outputs(true),
        "references_of_another_creature": instruction_rows(names, exchanged_facts(names, world)),
    }
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    figures: dict[str, Any] = {"before": test_figures(base, tokenizer, sets)}
    for label, rows in (("after", train), ("after_shuffled_answers", shuffled_outputs(train))):
        figures[label] = []
        for seed in SEEDS:
            model, training = run(tokenizer, rows, choice["learning_rate"], choice["steps"], seed)
            figures[label].append({**training, **test_figures(model, tokenizer, sets)})
            print(label, json.dumps(figures[label][-1]["references"]), flush=True)
    return figures


def write(record: dict[str, Any], path: Path = RECORD) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    cli = argparse.ArgumentParser(description="Choose the demo's hyperparameters, then test the choice once.")
    cli.add_argument("stage", choices=("grid", "test"))
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    if args.stage == "grid":
        record = grid()
        write(record)
        print(json.dumps(record["choice"]))
        return
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if "test" in record:
        raise SystemExit(
            "The test set was used already. A new choice needs a new grid, and ideally new test creatures."
        )
    record["test"] = test(record["choice"])
    write(record)


if __name__ == "__main__":
    main()
