"""A case of a recipe with a fault: a folder with recipe.yaml, and where it needs them ds.json, accelerate.yaml, rows/
and other files. Paths are relative to it, so that what is said of it does not depend on where it lies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOUND_ROWS = [{"prompt": f"Say {i}.\n", "completion": f"The fish says {i}."} for i in range(8)]
TEST_ROWS = {"rows/test.jsonl": json.dumps({"prompt": "Say 9.\n", "completion": "The fish says 9."}) + "\n"}
SOUND_DS_CONFIG = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
SOUND_RECIPE = """model_name_or_path: ./model
dataset_name: ./rows
random_weights: true
output_dir: out
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 10
max_length: 64
activation_checkpointing: false
save_strategy: "no"
save_model: false
report_to: none
"""


@dataclass(frozen=True)
class Side:
    """One way of writing it. `recipe`: lines that replace those of the same key, or are added."""

    recipe: str = ""
    without: tuple[str, ...] = ()  # keys taken out of the sound recipe
    whole: str | None = None  # the whole recipe, instead
    overrides: tuple[str, ...] = ()
    ds: str | Mapping[str, Any] | None = None  # text, or keys laid over ds_configs/zero2.json (None takes one out)
    accelerate: str | None = None
    rows: tuple[Mapping[str, Any], ...] | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def written(self) -> str:
        """What differs from the sound recipe, as a person would write it."""
        parts = []
        if self.whole is not None or self.recipe:
            parts.append(self.recipe if self.whole is None else self.whole or "(nothing)")
        parts += [f"(without `{key}`)" for key in self.without]
        if self.overrides:
            parts.append("run_sft.py recipe.yaml " + " ".join(self.overrides))
        if self.ds is not None:
            parts.append("ds.json: " + (self.ds if isinstance(self.ds, str) else json.dumps(self.ds)))
        if self.accelerate is not None:
            parts.append("accelerate.yaml:\n" + self.accelerate.rstrip())
        if self.rows is not None:
            parts.append("a row: " + json.dumps(self.rows[0]))
        parts += [f"{name}: {text}" for name, text in self.files.items()]
        text = "\n".join(part.rstrip() for part in parts) or "(as it is)"
        return text.encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be printed

    def write(self, folder: Path) -> list[str]:
        """Write the case into `folder`. Returns the arguments of run_sft.py, relative to it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").symlink_to(ROOT / "tiny_world" / "base")
        (folder / "rows").mkdir()
        rows = SOUND_ROWS if self.rows is None else self.rows
        (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        replaced = {line.partition(":")[0] for line in self.recipe.splitlines() if not line.startswith(" ")}
        kept = [
            line
            for line in SOUND_RECIPE.splitlines()
            if line.partition(":")[0] not in replaced and line.partition(":")[0] not in self.without
        ]
        if self.ds is not None:
            text = self.ds
            if not isinstance(text, str):
                laid = {key: value for key, value in (SOUND_DS_CONFIG | dict(text)).items() if value is not None}
                text = json.dumps(laid)
            (folder / "ds.json").write_text(text)
            if self.accelerate is None and "deepspeed" not in replaced:
                kept.append("deepspeed: ds.json")
        if self.accelerate is not None:
            (folder / "accelerate.yaml").write_text(self.accelerate)
        text = "\n".join([*kept, self.recipe]) if self.whole is None else self.whole
        (folder / "recipe.yaml").write_text(text)
        return ["recipe.yaml", *self.overrides]


@dataclass(frozen=True)
class Fault:
    """A fault, its fixed twin, and the code of the finding about it."""

    name: str
    bad: Side
    fixed: Side
    code: str
    level: str = "error"
    names: str = ""  # the key, name or number that its message must hold
    launcher_stops: bool = False  # before a run of ours begins


def recipe(name: str, bad: str, fixed: str, code: str, level: str = "error", names: str = "", **more: Any) -> Fault:
    """A fault in a line of the recipe."""
    return Fault(name, Side(recipe=bad, **more), Side(recipe=fixed, **more), code, level, names)


def ds(name: str, bad: Any, fixed: Any, code: str, level: str = "error", lines: str = "", names: str = "") -> Fault:
    """A fault in the DeepSpeed configuration."""
    return Fault(name, Side(ds=bad, recipe=lines), Side(ds=fixed, recipe=lines), code, level, names)
