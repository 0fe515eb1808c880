"""What the knobs do to memory, bytes and step time on two CPU processes: python -m benchmarks.knobs [GROUP ...]

Each group is a `zero-recipes sweep --set`, whose runs go one after another through one pair of processes, twice: once
forth and once back, the faster one counts. Beside them stands the peak of the same job on a GPU, which the engine's
simulation (zero-recipes plan) finds without one. Writes benchmarks/results/knobs.json, from which scripts/knobs_page.py
makes docs/knobs.md. About ten minutes on two cores; with names of groups, the others stay as they are.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, GPTNeoXConfig

from tests.helpers.group import Group
from tests.helpers.tiny import write_recipe
from zero_recipes.cli.sweep_runs import SweepRun, runs_of
from zero_recipes.config import recipe as recipes
from zero_recipes.core import environment
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import Refusal
from zero_recipes.libs.warnings import quieten
from zero_recipes.metrics.prediction import Prediction
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.metrics.sweep_file import SweptRun, read_sweep_file
from zero_recipes.plan import jobs as plan_jobs
from zero_recipes.plan.job import Job
from zero_recipes.plan.simulator import parent as simulation
from zero_recipes.report import rows
from zero_recipes.theory.zero_paper import paper_volume

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "knobs.json"
ALPACA = ROOT.parent / "shared" / "fixtures" / "alpaca_2k.jsonl"
PROCESSES = 2
KEPT = ("strategy", "status", "code", "reason", "swept", "state_bytes", "params_bytes", "grads_bytes",
        "optimizer_bytes", "peak_allocated_bytes", "communication_bytes", "step_seconds_median", "tokens_per_second",
        "non_padding_share", "final_loss")  # fmt: skip
ZERO = "zero_optimization"
RELEASED = {  # stage 3 lets go of each parameter after its use, as it must with large models
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 10**9,
    "stage3_prefetch_bucket_size": 0,
}


class Knobs(NamedTuple):
    """One sweep."""

    strategies: tuple[str, ...]
    sets: tuple[str, ...]
    options: tuple[str, ...] = ()  # the same for all its runs
    zero: dict[str, Any] | None = None  # keys of zero_optimization, likewise
    alpaca: int = 0  # so many rows of Alpaca instead of the tiny world's


GROUPS = {
    "reduce_bucket": Knobs(("zero2", "zero3"), (f"{ZERO}.reduce_bucket_size=5e4,5e5,5e6,5e7,5e8",)),
    "allgather_bucket": Knobs(("zero1", "zero2"), (f"{ZERO}.allgather_bucket_size=5e4,5e6,5e8,50001",)),
    "overlap": Knobs(("zero1", "zero2", "zero3"), (f"{ZERO}.overlap_comm=false,true",)),
    "prefetch": Knobs(("zero3",), (f"{ZERO}.stage3_prefetch_bucket_size=0,1e5,1e6,1e8,-1",), zero=RELEASED),
    "persistence": Knobs(("zero3",), (f"{ZERO}.stage3_param_persistence_threshold=0,1e3,1e5,1e6",), zero=RELEASED),
    "model_persistence": Knobs(
        ("zero3",),
        (f"{ZERO}.stage3_model_persistence_threshold=0,1e5,1e9",),
        zero=RELEASED | {"stage3_param_persistence_threshold": 10**9},
    ),
    "max_reuse": Knobs(("zero3",), (f"{ZERO}.stage3_max_reuse_distance=0,1e6,3e6,1e9",), zero=RELEASED),
    "max_live": Knobs(
        ("zero3",),
        (f"{ZERO}.stage3_max_live_parameters=0,1e6,2e6,1e9",),
        zero=RELEASED | {"stage3_prefetch_bucket_size": 10**8},
    ),
    "accumulation": Knobs(
        ("zero1", "zero2", "zero3"), ("per_device_train_batch_size=2,4,8",), ("--global_batch_size", "16")
    ),
    "checkpointing": Knobs(
        ("zero2",), ("per_device_train_batch_size=2,8,16", "activation_checkpointing=false,true")
    ),
    "packing": Knobs(("zero2",), ("packing=false,true", "max_length=128,256")),
    "supervised_logits": Knobs(("zero2", "zero3"), ("supervised_logits_only=false,true",)),
    "group_by_length": Knobs(  # an epoch, for the sampler begins with the longest rows
        ("zero2",),
        ("train_sampling_strategy=random,group_by_length", "per_device_train_batch_size=4,8"),
        ("--max_length", "512", "--max_steps", "-1", "--num_train_epochs", "1"),
        alpaca=400,
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    quieten()
    os.chdir(ROOT)
    folder = Path(tempfile.mkdtemp(prefix="knobs-"))
    recipe = write_recipe(folder, model_name_or_path=str(_model(folder / "neox")), dataset_name="./tiny_world",
                          max_length=128, max_steps=10, per_device_train_batch_size=4, attn_implementation="sdpa",
                          sample_prompts=None)  # fmt: skip
    document = json.loads(RESULT.read_text()) if names and RESULT.is_file() else {"groups": {}}
    two = Group(PROCESSES)
    try:
        for name in names or GROUPS:
            if GROUPS[name].alpaca and not ALPACA.is_file():
                print(f"{name} is left out: {ALPACA.name} (CC BY-NC 4.0) is not part of this repository", flush=True)
                continue
            document["groups"][name] = _measure(two, recipe, name, folder / name)
            _write(document)
            print(name, "done", flush=True)
    finally:
        two.close()


def _write(document: dict[str, Any]) -> None:
    """After each group: what has been measured is not lost with the rest."""
    document["groups"] = {name: document["groups"][name] for name in GROUPS if name in document["groups"]}
    document |= {
        "command": "python -m benchmarks.knobs",
        "processes": PROCESSES,
        "hardware": environment.hardware("cpu") | {"load_average": os.getloadavg()[1]},
        "versions": environment.versions(),
    }
    write_json(RESULT, document)


def _model(folder: Path) -> Path:
    """A GPT-NeoX with weights of several sizes in each of its six layers, for the tiny world's tokenizer."""
    GPTNeoXConfig(
        vocab_size=1408, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=0, pad_token_id=1,
        architectures=["GPTNeoXForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(folder)
    return folder


def _with_alpaca(recipe: Path, folder: Path, count: int) -> Path:
    """The recipe with so many rows of Alpaca, drawn with a seed."""
    rows = ALPACA.read_text().splitlines()
    (folder / "rows").mkdir(parents=True)
    (folder / "rows" / "train.jsonl").write_text("\n".join(random.Random(0).sample(rows, count)) + "\n")
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipes.read_recipe_file(recipe) | {"dataset_name": str(folder / "rows")}))
    return path


def _measure(group: Group, recipe: Path, name: str, folder: Path) -> dict[str, Any]:
    knobs = GROUPS[name]
    if knobs.alpaca:
        recipe = _with_alpaca(recipe, folder, knobs.alpaca)
    configs = {strategy: plan_jobs.CONFIGS / f"{strategy}.yaml" for strategy in knobs.strategies}
    runs = runs_of(recipe, configs, knobs.sets, list(knobs.options), PROCESSES)
    passes = [{run.name: _run(group, recipe, knobs, run, folder) for run in order} for order in (runs, runs[::-1])]
    planned = _planned_peaks(recipe, knobs, [run for run in runs if passes[0][run.name]["seconds"]])
    listed = [SweptRun(folder=run.name, strategy=run.strategy, values=dict(run.values)) for run in runs]
    read_sweep_file(folder).with_runs(listed).write(folder)
    found = []
    for measured in read_runs(folder):  # of the last pass
        (row,) = rows.table_rows([measured])
        both = [done[measured.folder.name] for done in passes]
        seconds = [each["seconds"] for each in both if each["seconds"]]
        row = {key: row[key] for key in KEPT} | {
            "step_seconds_median": min(seconds, default=None),
            "step_seconds_of_both": seconds,
            "tokens_per_second": max((each["tokens"] for each in both if each["tokens"]), default=None),
            "grown_bytes": max((each["grown_bytes"] for each in both if each["grown_bytes"]), default=None),
            "simulated": planned.get(measured.folder.name),
        }
        found.append(row)
    return {
        "strategies": list(knobs.strategies),
        "sets": list(knobs.sets),
        "options": list(knobs.options),
        "zero_optimization": knobs.zero or {},
        "alpaca": knobs.alpaca,
        "parameters": next(run.parameters for run in read_runs(folder) if run.parameters),
        "rows": found,
    }


def _ds_config(knobs: Knobs, run: SweepRun) -> dict[str, Any]:
    """The run's ds_config, with what the group sets in all of them; a value of the sweep counts before it."""
    if run.ds_config is None:
        config = json.loads((ROOT / "ds_configs" / f"{run.strategy}.json").read_text())
    else:
        config = json.loads(json.dumps(run.ds_config))
    swept = {key.rpartition(".")[2] for key in run.values}
    config[ZERO] |= {key: value for key, value in (knobs.zero or {}).items() if key not in swept}
    return config


def _run(group: Group, recipe: Path, knobs: Knobs, run: SweepRun, folder: Path) -> dict[str, Any]:
    """{"seconds", "tokens", "grown_bytes"} of a run, None where it was refused; its metrics.json is in folder/name."""
    output_dir = folder / run.name
    argv = [str(recipe), "--output_dir", str(output_dir), "--overwrite", "true", *knobs.options, *run.words]
    if run.refusal is None:
        try:
            config = folder / f"{run.name}.json"
            write_json(config, _ds_config(knobs, run))
            argv += ["--deepspeed", str(config)]
            ranks = group.run("knob_cases.train_and_watch", argv=argv)
            print(run.name, ranks[0]["metrics"]["step_seconds"], flush=True)
            seconds = ranks[0]["metrics"]["step_seconds"]["median"]
            tokens = ranks[0]["metrics"]["tokens_per_second"]["non_padding"]
            return {"seconds": seconds, "tokens": tokens, "grown_bytes": max(rank["grown_bytes"] for rank in ranks)}
        except AssertionError as error:  # CaseFailed
            found = [line for line in str(error).splitlines() if "refused: " in line or "[ZR" in line]
            if not found:
                raise
            message = found[0].rpartition("refused: ")[2].replace(str(config), "the ds_config")
    else:
        message = str(run.refusal).splitlines()[0].removeprefix("refused: ")
    print(run.name, "refused", message, flush=True)
    row = {"schema": 1, "status": "refused", "error": f"refused: {message}", "name": "knobs", "strategy": run.strategy}
    write_json(output_dir / "metrics.json", row)
    return {"seconds": None, "tokens": None, "grown_bytes": None}


def _planned_peaks(recipe: Path, knobs: Knobs, runs: list[SweepRun]) -> dict[str, dict[str, int]]:
    """{run: {"allocated_peak_bytes", "communication_bytes"}} of each run's job on as many GPUs, simulated."""
    mapping = recipes.read_recipe_file(recipe)
    jobs = {}
    for run in runs:
        parsed = recipes.parse_recipe(recipe, mapping, [*knobs.options, *run.words])
        config = plan_jobs.model_config(parsed.settings)
        job = plan_jobs.job_of(parsed, config, run.strategy, _ds_config(knobs, run), PROCESSES)
        if simulation.not_simulated(job) is None:
            jobs[run.name] = job
    try:
        found = dict(zip(jobs, simulation.simulate(list(jobs.values())), strict=True))
    except Refusal:  # of one of them, which stops them all
        found = {name: prediction for name, job in jobs.items() if (prediction := _simulated(name, job)) is not None}
    return {
        name: {
            "allocated_peak_bytes": prediction.allocated_peak_bytes,
            "communication_bytes": paper_volume(prediction.communication_bytes_per_step),
        }
        for name, prediction in found.items()
    }


def _simulated(name: str, job: Job) -> Prediction | None:
    try:
        return simulation.simulate([job])[0]
    except Refusal as refusal:
        print(name, "is not simulated:", refusal.why, flush=True)
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
