"""Where a run differs from TRL's own trainer, on the demo's model: python -m benchmarks.trl_differences

The same arguments and rows for SFTTrainer and ZeroSFTTrainer, on two processes on CPUs. Writes
results/trl_differences.json: losses of both, and the largest difference relative to TRL's.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).parent / "results" / "trl_differences.json"
BASE, ROWS = ROOT / "tiny_world" / "base", ROOT / "tiny_world" / "train.jsonl"
STEP = 4  # rows of a step: 2 on each of 2 processes
# what is compared -> (training rows, keys of SFTConfig, the first step whose loss counts)
CASES = {
    "evaluation": (STEP, {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}, None),
    "last step of an epoch": (21, {"max_steps": 6}, 6),
    "group_by_length, second epoch": (
        32,
        {"num_train_epochs": 2, "train_sampling_strategy": "group_by_length"},
        9,
    ),
    "after the end of a stream": (21, {"max_steps": 10}, 6),
    "stage 0 in bf16": (32, {"max_steps": 8, "bf16": True, "deepspeed": str(ROOT / "ds_configs/zero0.json")}, 1),
}


def train(case: str, ours: bool, folder: str) -> None:
    """On each rank: train, and let rank 0 print the losses as JSON."""
    import deepspeed
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from zero_recipes import ZeroSFTTrainer
    from zero_recipes.data.forms import alpaca_row

    count, keys, first = CASES[case]
    if "deepspeed" in keys:
        deepspeed.init_distributed("gloo", verbose=False)
    rows = Dataset.from_list([alpaca_row(json.loads(line)) for line in ROWS.read_text().splitlines()[: count + 11]])
    training, evaluation = rows.select(range(count)), rows.select(range(count, count + 11))
    if "stream" in case:
        training = training.to_iterable_dataset()
    defaults = {"bf16": False, "learning_rate": 1e-3, "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    args = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=STEP // 2,
        per_device_eval_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        activation_checkpointing=False,
        disable_tqdm=True,
        **defaults | keys,
    )
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    kind = ZeroSFTTrainer if ours else SFTTrainer
    trainer = kind(model, args=args, train_dataset=training, eval_dataset=evaluation, processing_class=tokenizer)
    trainer.train()
    key = "loss" if first else "eval_loss"
    losses = [entry[key] for entry in trainer.state.log_history if key in entry]
    if args.process_index == 0:
        print(json.dumps(losses[(first or 1) - 1 :]))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def launched(case: str, ours: bool) -> list[float]:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
        command += ["-m", "benchmarks.trl_differences", case, str(int(ours)), folder]
        ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    if not lines:
        raise RuntimeError(ended.stderr[-3000:])
    return json.loads(lines[-1])


def padding_free() -> dict[str, object]:
    """TRL's trainer refuses padding_free with a max_length; a recipe's losses beside those of padded rows."""
    recipe, losses = ["run_sft.py", "recipes/tiny.yaml", "--bf16", "false", "--eval_strategy", "no"], {}
    for value in ("false", "true"):
        with tempfile.TemporaryDirectory() as folder:
            options = ["--padding_free", value, "--max_steps", "6", "--sample_prompts", "0", "--save_model", "false"]
            command = [sys.executable, *recipe, *options, "--output_dir", folder]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            losses[value] = json.loads((Path(folder) / "metrics.json").read_text())["loss_history"]
    return {"processes": 1, "trl": "ValueError", "padded": losses["false"], "zero_recipes": losses["true"]}


def apart(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def main() -> None:
    from zero_recipes.core.host import hardware_facts, library_versions

    found = {case: {"trl": launched(case, False), "zero_recipes": launched(case, True)} for case in CASES}
    found["padding_free with max_length"] = padding_free()
    for row in found.values():
        row["largest_relative_difference"] = apart(row["zero_recipes"], row.get("padded", row["trl"]))
    document = {"command": "python -m benchmarks.trl_differences", "model": "tiny_world/base", "processes": 2}
    document |= {"differences": found, "hardware": hardware_facts("cpu"), "versions": library_versions()}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(*(f"{case}: {row['largest_relative_difference']:.1e}" for case, row in found.items()), sep="\n")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2] == "1", sys.argv[3]) if len(sys.argv) > 1 else main()
