"""How many example files of other trainers `zero-recipes import` maps: python -m benchmarks.imports FOLDER

FOLDER holds clones of axolotl and LLaMA-Factory. Writes results/imports.json. Whole: everything is
mapped. With a named loss: something is not done. With open points: other weights would follow; of those `data_only`,
where only the data is not known. Refused: no run at all. `no_text`: of the last two, those that are no supervised
training on text.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from zero_recipes.core.findings import Refusal
from zero_recipes.tools.imports.command import translated

# where the examples are, words of those that are counted, and what a file has that is no supervised training on text:
# preferences, rewards, images, sound, streams, classification, embeddings
PROJECTS = {
    "axolotl": (
        "examples/**/*.y*ml",
        ["base_model:"],
        r"(?m)^(rl|processor_type|pretraining_dataset|task_type|\w*reward_model):",
    ),
    "LLaMA-Factory": ("examples/**/*.yaml", ["stage: sft", "do_train: true"], r"mllm_demo|llava"),
}


def counted(clone: Path, pattern: str, words: list[str], no_text: str) -> dict:
    kinds = Counter(files=0, whole=0, with_a_named_loss=0, with_open_points=0, refused=0, data_only=0, no_text=0)
    open_points = Counter()
    for file in sorted(clone.glob(pattern)):
        text = file.read_text(encoding="utf-8")
        if any(word not in text for word in words):
            continue
        try:
            draft = translated(file, Path("recipe.yaml"))
        except Refusal:
            continue  # no file of training
        kinds["files"] += 1
        if draft.remarks["refuses"]:
            kind = "refused"
        elif draft.open_points:
            kind = "with_open_points"
        else:
            kind = "with_a_named_loss" if draft.remarks["loses"] else "whole"
        kinds[kind] += 1
        open_points.update(draft.open_points.keys())
        kinds["no_text"] += bool(kind in ("refused", "with_open_points") and re.search(no_text, text))
        kinds["data_only"] += draft.open_points.keys() in ({"dataset"}, {"datasets"})
    head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": head.stdout.strip()} | kinds | {"open_points": dict(open_points.most_common(12))}


if __name__ == "__main__":
    found = {name: counted(Path(sys.argv[1], name), *where) for name, where in PROJECTS.items()}
    Path(__file__).with_name("results").joinpath("imports.json").write_text(json.dumps(found, indent=1) + "\n")
