"""run_sft.py with what a session on a GPU reads beside metrics.json: run.py [--without_metrics] [--profile] RECIPE ...

Writes OUTPUT_DIR/beside.json: seconds of each step by a clock of its own, and what the card holds beside torch's
allocator when training ends. --without_metrics trains without the callbacks that measure (their price is the difference
of the steps), and ends there. --profile writes OUTPUT_DIR/trace.json.gz, two steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

OPTIONS = ("--without_metrics", "--profile")
BEFORE_PROFILE = 3  # steps


def main(arguments: list[str]) -> None:
    import run_sft

    options = {each for each in arguments if each in OPTIONS}
    prepare = run_sft.prepare

    def prepared(argv: list[str]):
        run = prepare(argv)
        _add_clock(run, options)  # now torch may come: the recipe's `env:` is in force
        return run

    run_sft.prepare = prepared
    try:
        run_sft.main([each for each in arguments if each not in OPTIONS])
    except (run_sft.Refusal, run_sft.RunFailed) as ending:
        run_sft.leave(run_sft.print_ending(ending))
    run_sft.leave(0)


def _add_clock(run, options: set[str]) -> None:
    from transformers import TrainerCallback

    from zero_recipes.core.files import write_json
    from zero_recipes.core.process import leave
    from zero_recipes.training.trainer import RecipeTrainer

    on_cuda = run.device == "cuda"

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.profiler = None

        def mark(self) -> None:
            if on_cuda:
                import torch

                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

        def on_step_begin(self, args, state, control, **kwargs):
            if not self.marks:
                self.mark()

        def on_step_end(self, args, state, control, **kwargs):
            self.mark()
            if "--profile" in options and len(self.marks) == BEFORE_PROFILE:
                self.profiler = _profiler(on_cuda, run.output_dir / "trace.json.gz")
            elif self.profiler is not None:
                self.profiler.step()

    plain = RecipeTrainer.train_to_the_end

    def train_to_the_end(self) -> None:
        clock = Clock()
        self.add_callback(clock)
        if "--without_metrics" in options:
            for callback in (self.stage_metrics, self.divergence):
                self.remove_callback(callback)
            self.stage_metrics.count_tokens = self.stage_metrics.add_loss = lambda *arguments: None
            self.train()
        else:
            plain(self)
        seconds = [later - earlier for earlier, later in zip(clock.marks, clock.marks[1:], strict=False)]
        write_json(run.output_dir / "beside.json", {"step_seconds": seconds} | (_card() if on_cuda else {}))
        if "--without_metrics" in options:
            leave(0)

    RecipeTrainer.train_to_the_end = train_to_the_end


def _card() -> dict[str, int]:
    """Bytes of the card, now: all of it, what is free, what torch's allocator has taken."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"total_bytes": total, "free_bytes": free, "reserved_now_bytes": torch.cuda.memory_reserved()}


def _profiler(on_cuda: bool, trace: Path):
    """A started profiler that writes two steps to `trace` after a step of warm-up."""
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU] + ([profiler.ProfilerActivity.CUDA] if on_cuda else [])
    started = profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(trace)),
    )
    started.start()
    return started


if __name__ == "__main__":
    main(sys.argv[1:])
