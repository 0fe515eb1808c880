"""One rank of tests/helpers/group.py: reads cases from standard input, runs them, writes each result to a file."""

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from zero_recipes.compat.warnings import quieten

quieten()
import deepspeed  # noqa: E402
import torch  # noqa: E402

from tests.helpers.forget import forget_last_run  # noqa: E402


def main(folder: Path) -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    rank = os.environ["RANK"]
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    importlib.import_module("tests.helpers.cases")  # once, before the first case
    gc.freeze()  # what is imported stays: collecting after a case need not go through it, which takes half a second
    environment = dict(os.environ)
    for line in sys.stdin:
        os.environ.clear()  # accelerate leaves the last run's plugins there
        os.environ.update(environment)
        order = json.loads(line)
        print(f"=== case {order['number']}: {order['case']} {order['arguments']}", flush=True)
        forget_last_run()
        try:
            module, _, case = order["case"].rpartition(".")
            cases = importlib.import_module(f"tests.helpers.{module or 'cases'}")
            outcome = {"value": getattr(cases, case)(**order["arguments"])}
        except BaseException:
            outcome = {"traceback": traceback.format_exc()}
        gc.collect()
        path = folder / f"case{order['number']}.rank{rank}.json"
        path.with_suffix(".part").write_text(json.dumps(outcome))
        path.with_suffix(".part").rename(path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
