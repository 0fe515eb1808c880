"""One program of a comparison, in a process of its own: side_by_side.py PROGRAM FOLDER OWN_FOLDER

PROGRAM: prepare, which writes model, rows and FOLDER/job.json for the case in FOLDER/case.json; or one of
benchmarks/throughput_programs.py, e.g. recipe, engine (a bare DeepSpeed loop), engine_tuned, ddp, torch, trl_tuned,
with what tells two of the same apart: "recipe again". The first recipe leaves its batches for the bare loops.

The rows are the same in each of two epochs, so every program is measured cold (each shape for the first time) and warm.
Writes OWN_FOLDER/beside.json.
"""

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.session.turns import in_its_way, wait_for, wait_for_turn  # noqa: E402

EPOCHS = 2


def main(name: str, folder: Path, own: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    if name == "prepare":
        prepare(case, folder)
        return
    from zero_recipes.core.process import leave

    with in_its_way():
        measure(name.split()[0], folder, own)
    leave(0)


def prepare(case: dict, folder: Path) -> None:
    import torch

    from benchmarks.throughput_inputs import Workload, job_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    epochs = {"num_train_epochs": EPOCHS, "train_sampling_strategy": "sequential"}
    keys = epochs | case["keys"]
    rows = case.get("rows", "drawn")
    work = Workload("", case["model"], rows, case["steps"], 1e-5, at_once=2, ranks=1, device=device, recipe=keys)
    job = job_of(work, folder / "job") | {"strategy": case["strategy"], "kept": str(folder / "batches.pt")}
    job["trl"] |= epochs
    job["trl_tuned"] |= epochs
    written = folder / "job.new"
    written.write_text(json.dumps(job))
    written.rename(folder / "job.json")  # whole: programs wait for it


def measure(program: str, folder: Path, own: Path) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    import torch

    from benchmarks import throughput_programs

    wait_for(folder / "job.json")
    job = json.loads((folder / "job.json").read_text())
    on_gpu = job["device"] == "cuda"
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", auto_mpi_discovery=False, verbose=False)
    way = json.loads(os.environ.get("SESSION_WAY", "{}"))
    shutil.copy(folder / "job" / "recipe.yaml", own)
    job |= {"folder": str(own), "recipe": way.get("keys", {})}
    found = throughput_programs.run(program, job, wait_for_turn)
    half = len(found["step_seconds"]) // EPOCHS
    found |= {"cold_seconds": found["step_seconds"][:half], "warm_seconds": found["step_seconds"][half:]}
    found["accumulation"] = 1 if program == "trl" else job["accumulation"]
    if on_gpu:
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()
    (own / "beside.json").write_text(json.dumps({"program": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
