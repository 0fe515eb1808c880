"""A board of all causal model types of transformers: python -m benchmarks.families [TYPE ...] [--failing]

Each type is a small model with random weights, which run_sft.py's own code trains on CPUs in fp32: in one process, and
on two under ZeRO stages 2 and 3, FSDP2, with LoRA on all linear layers, packed, with recomputation, in bf16; what was
saved is loaded and compared, and a run goes on from a checkpoint. Every step trains on all rows, so that the losses of
all runs of a type are the same ones. A type's row is written to results/families.json when it ends: a board that was
stopped goes on where it was. docs/models.md shows it (make reference).
"""

import argparse
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import family_models, family_runs
from tests.helpers.group import CaseFailed, Group, start_server
from tests.helpers.tiny import named
from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import hardware_facts, library_versions
from zero_recipes.engine.warnings import quieten

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
HANG_SECONDS = 60  # a rank that waits longer is killed, which costs its own cell
ROWS = 8  # all of them in every step
STEPS, SAVED_AT = 3, 2
EQUAL = 1e-5  # the largest relative difference of a loss
BF16 = 0.02  # that of a loss in bf16 from the one in fp32
RELOADED = 1e-5  # of logits
LORA = {
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
    "learning_rate": 2e-2,
    "adam_epsilon": 1e-4,  # where a gradient is 0 but for rounding, Adam would make a whole step of the rounding
}
PACKED = {"packing": True, "per_device_train_batch_size": 1, "global_batch_size": 1}
SAVES = {"save_model": True, "save_strategy": "steps", "save_steps": SAVED_AT}
CELLS = ("one", "zero2", "zero3", "fsdp2", "lora", "packed", "recomputed", "bf16", "saved", "resumed")
EQUAL_CELL, REFUSED, UNSUPPORTED, FAILS, NOT_RUN = "equal", "refused", "unsupported", "fails", "not run"


def write_rows(folder: Path) -> Path:
    """Rows of the tiny world that are of uneven length and fill one pack together."""
    folder.mkdir(parents=True)
    lines = (ROOT / "tiny_world" / "train.jsonl").read_text().splitlines()[:ROWS]
    rows = []
    for line in lines:
        row = json.loads(line)
        rows.append({"prompt": f"{row['instruction']} {row['input']}".strip() + "\n", "completion": row["output"]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_recipe(folder: Path, rows: Path) -> Path:
    """The recipe of a type's runs, in fp32; the runs' own keys come over it."""
    recipe = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(rows),
        "bf16": False,
        "dtype": "float32",
        "max_length": 256,
        "global_batch_size": ROWS,
        "per_device_train_batch_size": ROWS // 2,
        "max_steps": STEPS,
        "learning_rate": 2.0e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "activation_checkpointing": False,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "save_model": False,
        "report_to": "none",
        "router_aux_loss_coef": 0.0,  # it is of a micro batch by its definition: two processes have two
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1))  # JSON is YAML
    return path


class Board:
    """The processes that the runs of all types share, and a folder for what they write."""

    def __init__(self, folder: Path, groups: dict[int, Group]):
        """`groups`: of one process and of two, by their sizes."""
        self.groups = groups
        self.folder = folder
        self.rows = write_rows(folder / "rows")

    def row_of(self, kind: str, wanted: Collection[str] = CELLS) -> dict[str, Any]:
        """The cells of a type; an error of its class in place of them."""
        began = time.perf_counter()
        folder = self.folder / kind
        folder.mkdir()
        row: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
        try:
            model = family_models.write_family(kind, folder / "model")
        except Exception as error:  # a class may raise anything; the board goes on
            row["unsupported"] = family_models.in_a_line(error)
        else:
            row |= {"class": model.name, "from": model.source, "small": model.cuts, "parameters": model.parameters}
            row["cells"] = self.cells(folder, wanted)
        row["seconds"] = round(time.perf_counter() - began, 1)
        row["load"] = round(os.getloadavg()[0], 1)
        shutil.rmtree(folder)
        return row

    def cells(self, folder: Path, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
        """What became of the runs of a type's model."""
        recipe = write_recipe(folder, self.rows)
        one = self.run(recipe, 1, "single", "one")
        if "losses" not in one:
            return {name: {"result": NOT_RUN} for name in CELLS} | {"one": outcome(one)}
        losses = one["losses"]

        @functools.cache
        def zero3() -> dict[str, Any]:
            return self.run(recipe, 2, "zero3", "zero3", reloads=True, **SAVES)

        def run_on_two(name: str, strategy: str, **keys) -> dict[str, Any]:
            return compared(self.run(recipe, 2, strategy, name, **keys), losses, BF16 if name == "bf16" else EQUAL)

        ways = {
            "one": lambda: {"result": EQUAL_CELL, "losses": losses},
            "zero2": lambda: run_on_two("zero2", "zero2"),
            "zero3": lambda: compared(zero3(), losses, EQUAL),
            "fsdp2": lambda: run_on_two("fsdp2", "fsdp2"),
            "lora": lambda: self.lora(recipe),
            "packed": lambda: compared(self.run(recipe, 1, "single", "packed", **PACKED), losses, EQUAL),
            "recomputed": lambda: run_on_two("recomputed", "zero3", activation_checkpointing=True),
            "bf16": lambda: run_on_two("bf16", "zero2", bf16=True),
            "saved": lambda: judged_saved(zero3()),
            "resumed": lambda: self.resumed(recipe, zero3()),
        }
        return {name: way() for name, way in ways.items() if name in wanted}

    def lora(self, recipe: Path) -> dict[str, Any]:
        """An adapter on all linear layers under stage 3, compared with one process."""
        alone = self.run(recipe, 1, "single", "lora-alone", **LORA)
        if "losses" not in alone:
            return outcome(alone)
        return compared(self.run(recipe, 2, "zero3", "lora", **LORA), alone["losses"], EQUAL)

    def resumed(self, recipe: Path, whole: dict[str, Any]) -> dict[str, Any]:
        """Go on from stage 3's checkpoint, in a folder of its own."""
        if "losses" not in whole:
            return {"result": NOT_RUN}
        folder = recipe.parent
        shutil.copytree(folder / "zero3", folder / "resumed")
        for path in (folder / "resumed").glob("checkpoint-*"):
            if path.name != f"checkpoint-{SAVED_AT}":
                shutil.rmtree(path)
        run = self.run(recipe, 2, "zero3", "resumed", resume_from_checkpoint=True, **SAVES)
        return compared(run, whole["losses"], EQUAL)

    def run(
        self,
        recipe: Path,
        world: int,
        strategy: str,
        name: str,
        reloads: bool = False,
        left_out: str | None = None,
        **keys,
    ) -> dict[str, Any]:
        """One run on `world` processes: its losses, its refusal's codes, or an error."""
        errors = recipe.parent / f"errors-{name}"
        errors.mkdir()
        words = [str(recipe), "--output_dir", str(recipe.parent / name), *named(strategy)]
        if world == 1 and "per_device_train_batch_size" not in keys:
            keys["per_device_train_batch_size"] = ROWS
        for key, value in keys.items():
            words += [f"--{key}", json.dumps(value) if not isinstance(value, str) else value]
        group = self.groups[world]
        try:
            found = group.run(family_runs.train, argv=words, errors=str(errors), reloads=reloads)[0]
        except CaseFailed as failure:
            group.kill()
            raised = [json.loads(path.read_text()) for path in sorted(errors.glob("rank*.json"))]
            return raised[0] if raised else {"error": last_words(str(failure))}
        if "error" in found:
            group.kill()  # the ranks may have stopped at different collectives
        return found


def outcome(run: dict[str, Any]) -> dict[str, Any]:
    """The cell of a run without losses."""
    if "refused" in run:
        return {"result": REFUSED, "codes": run["refused"], "what": run["what"]}
    return {"result": FAILS, "error": run["error"]}


def compared(run: dict[str, Any], losses: list[float], limit: float) -> dict[str, Any]:
    """The cell of a run whose losses are to be these ones, up to a relative difference."""
    if "losses" not in run:
        return outcome(run)
    if len(run["losses"]) != len(losses):
        return {"result": FAILS, "error": f"{len(run['losses'])} steps in place of {len(losses)}"}
    gaps = [abs(mine - wanted) / abs(wanted) for mine, wanted in zip(run["losses"], losses, strict=True)]
    for step, gap in enumerate(gaps, 1):
        if not gap <= limit:  # NaN is no less
            return {"result": FAILS, "gap": gap, "error": f"the loss of step {step} differs by {gap:.1e}"}
    gap = max(gaps)
    return {"result": EQUAL_CELL, "gap": gap}


def judged_saved(run: dict[str, Any]) -> dict[str, Any]:
    """The cell of a saved model that was loaded again."""
    if "losses" not in run:
        return {"result": NOT_RUN}
    gap = run["reloaded"]
    if not gap <= RELOADED:
        return {"result": FAILS, "gap": gap, "error": f"logits of the loaded model differ by {gap:.1e}"}
    return {"result": EQUAL_CELL, "gap": gap}


def is_explained(words: dict[str, str]) -> bool:
    """Whether families.yaml knows the errors of a row."""
    patterns = [entry["error"] for entry in family_models.board_data()["explained"]]
    return all(any(re.search(pattern, text) for pattern in patterns) for text in words.values())


def last_words(failure: str) -> str:
    """Of a rank that has ended or hung."""
    lines = [line for line in failure.splitlines() if line.strip()]
    return f"{lines[0]}: {lines[-1]}"[:300]


def results(row: dict[str, Any]) -> list[str]:
    """The results of a row's cells."""
    return [cell["result"] for cell in row["cells"].values()] if "cells" in row else [UNSUPPORTED]


def types_to_do(names: list[str], failing: bool, rows: dict[str, Any]) -> list[str]:
    """Types that are named, or have a cell that fails, or, without either, have no row yet."""
    if names:
        return names
    if failing:
        return [kind for kind in family_models.TYPES if kind not in rows or FAILS in results(rows[kind])]
    return [kind for kind in family_models.TYPES if kind not in rows]


def main(argv: list[str]) -> None:
    """Run the board, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--failing", action="store_true", help="redo the types that have a cell that fails, or no row")
    parser.add_argument("--hang", type=float, default=HANG_SECONDS, help="seconds after which a rank is killed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    quieten()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    start_server()
    groups = {world: Group(world, arguments.hang) for world in (1, 2)}
    todo = types_to_do(arguments.types, arguments.failing, read_results(arguments.results)["types"])
    with tempfile.TemporaryDirectory() as temporary:
        board = Board(Path(temporary), groups)
        for kind in todo:
            row = board.row_of(kind)
            write_row(kind, row, arguments.results)
            print(kind, row["seconds"], dict(Counter(results(row))), failures(row), flush=True)
    for group in groups.values():
        group.close()


def read_results(path: Path) -> dict[str, Any]:
    """The board so far."""
    return json.loads(path.read_text()) if path.is_file() else {"types": {}}


def write_row(kind: str, row: dict[str, Any], path: Path) -> None:
    """Add a type's row, with where it was measured."""
    document = read_results(path)
    document["known"] = len(family_models.TYPES)  # to transformers
    document["limits"] = {"losses": EQUAL, "bf16": BF16, "logits": RELOADED}
    document |= {"hardware": hardware_facts("cpu"), "versions": library_versions()}
    document["types"] = dict(sorted((document["types"] | {kind: row}).items()))
    write_json(path, document)


def failures(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row that are not equal, in words."""
    cells = row.get("cells", {})
    words = {name: cell.get("error") or ",".join(cell.get("codes", ())) for name, cell in cells.items()}
    return {name: text for name, text in words.items() if text} or ({"": row["unsupported"]} if not cells else {})


if __name__ == "__main__":
    main(sys.argv[1:])
