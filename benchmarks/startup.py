"""Seconds from the start of a process to the end of its first step, beside importing the stack and building an engine.

    python benchmarks/startup.py [--repeats 5] [--earlier FOLDER]

Writes benchmarks/results/startup.json. In turn, in fresh processes under `accelerate launch` with two processes:

  bare   imports torch, transformers, trl, deepspeed, accelerate and datasets, loads the model of recipes/tiny.yaml and
         builds a DeepSpeed engine around it (stage 2, bf16, AdamW): nothing of this repository, and no step;
  ours   run_sft.py recipes/tiny.yaml from its start to the end of its first optimizer step: the recipe's checks, its
         rows (from the cache of the run before), its questions before training, the engine, the step;
  earlier  the same of another version of this repository, checked out in FOLDER.

Seconds are those of rank 0, from the start of its process as the kernel has it: what the launcher takes before is in
none. CPU seconds beside them, of all threads, depend less on what else the machine does. `ours_by_phase`: where they
went (zero_recipes/core/phases.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE, ACCELERATE = "recipes/tiny.yaml", "accelerate_configs/zero2.yaml"
GOAL = 1.3


def age() -> float:
    """Seconds since this process was started; the kernel counts in hundredths (proc(5), starttime)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def bare(note: Path) -> None:
    """What every run of the stack has to do."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import deepspeed
    import torch
    import transformers
    from trl import SFTConfig, SFTTrainer  # noqa: F401

    imported = age()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny_world/base", dtype=torch.bfloat16)
    transformers.AutoTokenizer.from_pretrained("tiny_world/base")
    config = json.loads(Path("ds_configs/zero2.json").read_text())
    sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    config = {key: value for key, value in config.items() if key not in ("train_batch_size", "fp16")} | sizes
    config["bf16"] = {"enabled": True}
    buckets = {key: int(5e8) for key, value in config["zero_optimization"].items() if value == "auto"}
    config["zero_optimization"] |= buckets
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if os.environ["RANK"] == "0":
        note.write_text(json.dumps({"imports": imported, "all": age(), "cpu": time.process_time()}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def ours(note: Path, arguments: list[str]) -> None:
    """run_sft.py of the working directory as it is, with a look at the clock after its first step."""
    sys.path.insert(0, os.getcwd())
    import run_sft

    run = run_sft.prepare(arguments)
    from zero_recipes.distributed.init import process_group
    from zero_recipes.metrics.callback import StageMetricsCallback

    ends_step = StageMetricsCallback.on_step_end

    def on_step_end(self, *args, **kwargs):
        ends_step(self, *args, **kwargs)
        if self.done == 1 and os.environ["RANK"] == "0":
            note.write_text(json.dumps({"all": age(), "cpu": time.process_time()}))

    StageMetricsCallback.on_step_end = on_step_end
    with process_group(run):
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
        trainer.end()


def launched(what: str, folder: Path, root: Path) -> dict[str, float]:
    """One launch of two processes from the folder `root`; what rank 0 noted."""
    note, output = folder / f"{what}.json", folder / "output"
    arguments = [RECIPE, "--max_steps", "1", "--eval_strategy", "no", "--save_model", "false"]
    arguments += ["--output_dir", str(output), "--overwrite", "true"]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", ACCELERATE]
    command += [__file__, "--process", what, str(note), *([] if what == "bare" else arguments)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(note.read_text())
    if what == "ours":
        found["phases"] = json.loads((output / "metrics.json").read_text())["phase_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--earlier", type=Path)
    arguments = parser.parse_args()
    roots = {"bare": ROOT, "ours": ROOT} | ({"earlier": arguments.earlier} if arguments.earlier else {})
    found: dict[str, list[dict]] = {what: [] for what in roots}
    folder = Path(tempfile.mkdtemp())
    try:
        for number in range(-1, arguments.repeats):  # the first pair fills the page cache and the cache of rows
            order = list(roots) if number % 2 else list(roots)[::-1]
            pair = {what: launched(what, folder, roots[what]) for what in order}
            print({what: round(seen["all"], 2) for what, seen in pair.items()}, flush=True)
            if number >= 0:
                for what, seen in pair.items():
                    found[what].append(seen)
    finally:
        shutil.rmtree(folder)
    ratios = [mine["all"] / its["all"] for mine, its in zip(found["ours"], found["bare"], strict=True)]
    phases = found["ours"][0]["phases"]
    document = {
        "what": "seconds of rank 0 from its process's start; bare: the stack imported and an engine built; ours: "
        f"run_sft.py {RECIPE} to the end of its first step. Medians of {arguments.repeats} launches of each, in turn",
        "bare": round(statistics.median(seen["all"] for seen in found["bare"]), 3),
        "bare_imports": round(statistics.median(seen["imports"] for seen in found["bare"]), 3),
        "ours": round(statistics.median(seen["all"] for seen in found["ours"]), 3),
        "earlier": round(statistics.median(seen["all"] for seen in found["earlier"]), 3) if arguments.earlier else None,
        "cpu": {what: round(statistics.median(run["cpu"] for run in runs), 3) for what, runs in found.items()},
        "ours_by_phase": {
            name: round(statistics.median(seen["phases"][name] or 0 for seen in found["ours"]), 3) for name in phases
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "goal": GOAL,
    }
    sys.path.insert(0, str(ROOT))
    from zero_recipes.core import environment
    from zero_recipes.core.files import write_json

    hardware = environment.hardware("cpu") | {"cores": os.cpu_count(), "load_average": os.getloadavg()[1]}
    write_json(
        ROOT / "benchmarks" / "results" / "startup.json",
        document | {"hardware": hardware, "versions": environment.versions()},
    )
    print({what: document["cpu"][what] for what in roots}, "CPU seconds")
    print(f"start to first step {document['ours']:.2f} s, bare {document['bare']:.2f} s: {document['ratio']:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        _, what, note, *rest = sys.argv[1:]
        bare(Path(note)) if what == "bare" else ours(Path(note), rest)
    else:
        main()
