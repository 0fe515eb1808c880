"""One run of each strategy that the tests of this folder share: they read what it left, and never write there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.helpers import cases
from tests.helpers.tiny import named, write_recipe, write_rows

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2")
ROWS = 23  # of 2 rows on each of 2 ranks: six steps, the last of them filled with a repeated row
STEPS = 6


@dataclass(frozen=True)
class Trained:
    """A finished run on two processes."""

    recipe: Path
    folder: Path  # its output_dir: model, checkpoint-3, checkpoint-6, samples.jsonl, metrics.json
    result: dict[str, Any]  # of rank 0: see tests/helpers/cases.py `train`

    @property
    def metrics(self) -> dict[str, Any]:
        return self.result["metrics"]


@pytest.fixture(scope="session")
def trained(two, tmp_path_factory, worker_id):
    """A function: the run of a strategy in bf16, one epoch of six steps with evaluation, samples, checkpoints, save.

    pytest's processes share the runs: the first that needs one makes it, the others read what it left.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "trained"
    with FileLock(f"{folder}.lock"):
        if not (folder / "recipe.yaml").is_file():
            write_recipe(
                folder,
                dataset_name=str(write_rows(folder / "few", count=ROWS)),
                max_length=96,
                max_steps=-1,
                num_train_epochs=1,
                eval_strategy="steps",
                eval_steps=3,
                per_device_eval_batch_size=2,
                sample_prompts=3,
                sample_max_new_tokens=2,
                save_strategy="steps",
                save_steps=3,
                save_model=True,
            )

    def run(strategy: str) -> Trained:
        recipe, out, kept = folder / "recipe.yaml", folder / strategy, folder / f"{strategy}.json"
        with FileLock(f"{out}.lock"):
            if not kept.is_file():
                result = two.run(cases.train, argv=[str(recipe), "--output_dir", str(out), *named(strategy)])[0]
                kept.write_text(json.dumps(result))
        result = json.loads(kept.read_text())
        assert result["metrics"]["strategy"] == strategy
        return Trained(recipe, out, result)

    return run
