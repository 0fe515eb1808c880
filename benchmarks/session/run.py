"""run_sft.py, timed by a clock of its own: run.py RECIPE --output_dir FOLDER [--key value ...]

Writes FOLDER/beside.json: the seconds of each step, and what the card holds beside torch's allocator after training.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main(arguments: list[str]) -> None:
    import run_sft

    time_training(Path(arguments[arguments.index("--output_dir") + 1]))
    try:
        run_sft.main(arguments)
    except (run_sft.Refusal, run_sft.RunFailed) as ending:
        run_sft.leave(run_sft.print_ending(ending))
    run_sft.leave(0)


def time_training(folder: Path) -> None:
    """Time every step that SFTTrainer trains; nothing of the run knows of it."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_begin(self, args, state, control, **kwargs):
            if not self.marks:
                self.on_step_end(args, state, control)

        def on_step_end(self, args, state, control, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    plain = SFTTrainer.train

    def timed_train(self, *arguments, **keywords):
        clock = Clock()
        self.add_callback(clock)
        ended = plain(self, *arguments, **keywords)
        seconds = [later - earlier for earlier, later in zip(clock.marks, clock.marks[1:], strict=False)]
        if self.is_world_process_zero():
            (folder / "beside.json").write_text(json.dumps({"step_seconds": seconds} | card_bytes()))
        return ended

    SFTTrainer.train = timed_train


def card_bytes() -> dict[str, int]:
    """Memory of the card now: all of it, what is free, what torch's allocator has reserved."""
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"total_bytes": total, "free_bytes": free, "reserved_now_bytes": torch.cuda.memory_reserved()}


if __name__ == "__main__":
    main(sys.argv[1:])
