"""Seconds of preparing 52,000 Alpaca rows: by one process, by one for each core, and again for another micro batch.

    python benchmarks/rows.py --rows alpaca.jsonl

Writes benchmarks/results/rows.json. `--rows`: a JSON Lines file with instruction, input and output; its rows are
repeated up to 52,000, as many as tatsu-lab/alpaca has. The tokenizer is the tiny recipe's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import ScriptArguments, SFTConfig  # noqa: E402
from trl.scripts.utils import DatasetMixtureConfig  # noqa: E402

from zero_recipes.core import environment  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.core.host_limits import Host  # noqa: E402
from zero_recipes.data import prepare, row_hash, splits  # noqa: E402

ROWS = 52_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True)
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    for function, module in (("audit", splits), ("data_sha256", prepare)):
        setattr(module, function, timed(getattr(module, function), function, seconds))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows"
        data.mkdir()
        lines = arguments.rows.read_text().splitlines()
        data.joinpath("train.jsonl").write_text("\n".join(itertools.islice(itertools.cycle(lines), ROWS)) + "\n")
        for what, workers in (("one process", 1), ("a process for each core", Host().cores())):
            datasets.config.HF_DATASETS_CACHE = Path(folder) / what
            splits.workers = lambda rows, requested, workers=workers: workers if workers > 1 else None
            found = timed(prepared, what, seconds)(data, folder, 4)
        again = timed(prepared, "another micro batch", seconds)(data, folder, 8)
        assert again.data_sha256 == found.data_sha256
        timed(row_hash.first_version, "data_sha256 of the first version", seconds)(found.train)
    hardware = environment.hardware("cpu") | {"cores": Host().cores(), "load_average": os.getloadavg()[1]}
    about = {"rows": ROWS, "tokens": found.audit.tokens, "hardware": hardware, "versions": environment.versions()}
    rounded = {what: round(spent, 2) for what, spent in seconds.items()}
    write_json(ROOT / "benchmarks" / "results" / "rows.json", {"seconds": rounded, **about})
    print(rounded)


def prepared(data: Path, folder: str, micro_batch: int) -> prepare.Prepared:
    training_args = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, max_length=512, per_device_train_batch_size=micro_batch
    )
    ours = SimpleNamespace(dataset_format="alpaca", sample_prompts=0, ignore=["ZR515"])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    script_args = ScriptArguments(dataset_name=str(data))
    return prepare.prepare_rows(script_args, training_args, DatasetMixtureConfig(), ours, tokenizer)


def timed(function, what: str, seconds: dict[str, float]):
    def call(*arguments):
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds[what] = time.perf_counter() - started

    return call


if __name__ == "__main__":
    main()
