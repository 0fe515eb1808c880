"""run_sft.py, timed by a clock of its own: run.py RECIPE --output_dir FOLDER [--key value ...]

Writes FOLDER/beside.json: the seconds of each step, and what the card holds beside torch's allocator after training.
"""

import json
import sys
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
    from trl import SFTTrainer

    from benchmarks.throughput_programs import Clock, Seen

    plain = SFTTrainer.train

    def timed_train(self, *arguments, **keywords):
        seen = Seen("cuda")
        self.add_callback(Clock(seen))
        ended = plain(self, *arguments, **keywords)
        free, total = torch.cuda.mem_get_info()
        found = {"total_bytes": total, "free_bytes": free, "reserved_now_bytes": torch.cuda.memory_reserved()}
        if self.is_world_process_zero():
            (folder / "beside.json").write_text(json.dumps(found | {"step_seconds": seen.step_seconds()}))
        return ended

    SFTTrainer.train = timed_train


if __name__ == "__main__":
    main(sys.argv[1:])
