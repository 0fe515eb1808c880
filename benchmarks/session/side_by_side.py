"""`trl sft` with its defaults, the recipe and a bare loop on one GPU: side_by_side.py STRATEGY MODEL FOLDER RECIPE_KEYS

The programs of benchmarks/throughput.py in one process. Writes FOLDER/beside.json and the recipe's metrics.json. A
program that fails leaves its error there, and the next one begins: `trl sft` out of memory is a result.
"""

import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main(strategy: str, model: str, folder: Path, keys: dict) -> None:
    from zero_recipes.core.process import leave

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    import torch

    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, verbose=False)
    from benchmarks import throughput_programs
    from benchmarks.throughput_inputs import Workload, job_of
    from tests.helpers.forget import forget_last_run

    work = Workload("", model, "drawn", 6, 1e-5, at_once=2, ranks=1, device="cuda", recipe=keys)
    job = job_of(work, folder / "job") | {"strategy": strategy}
    found, environment = {}, dict(os.environ)
    for program in ("trl", "recipe", "engine"):
        os.environ.clear()  # accelerate leaves the last run's plugins there
        os.environ.update(environment)
        forget_last_run()
        try:
            ran = throughput_programs.run(program, job)
            found[program] = ran | {"accumulation": 1 if program == "trl" else job["accumulation"]}
        except Exception as error:
            found[program] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        (folder / "beside.json").write_text(json.dumps({"programs": found}))
        torch.cuda.empty_cache()
    if "error" not in found["recipe"]:
        shutil.copy(folder / "job" / "recipe" / "metrics.json", folder)
    leave(1 if "error" in found["recipe"] else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
