"""run_sft.py that waits at a place of PAUSE, "prepared step": it prints the place, and goes on with a line of input."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import run_sft
from tests.helpers.around import before
from zero_recipes.core.findings import print_ending
from zero_recipes.core.process import leave

places = os.environ["PAUSE"].split()
original = run_sft.train


def pause(place: str) -> None:
    if place in places:
        places.remove(place)
        print(f"paused: {place}", flush=True)
        sys.stdin.readline()


def train(run):
    from zero_recipes.training.trainer import ZeroSFTTrainer

    pause("prepared")  # it has looked at the folder, and does not hold it
    with before(ZeroSFTTrainer, "training_step", lambda *_: pause("step")):
        return original(run)


run_sft.train = train
if __name__ == "__main__":
    try:
        run_sft.main(sys.argv[1:])
    except Exception as ending:
        leave(print_ending(ending))
    leave(0)
