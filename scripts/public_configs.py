"""Configurations of other projects: what is said of each, what becomes of it, and what TRL or accelerate alone makes of
those that are refused. Writes tests/helpers/public_configs.json and docs/public_configs.md.

    python scripts/public_configs.py [--seconds 200]     # goes on where it stopped; --page: the page alone

The files are not in this repository: tests/helpers/public_files.py says where they are looked for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers import public_files as public  # noqa: E402

PAGE = ROOT / "docs" / "public_configs.md"
INTRODUCTION = """# Configurations that people have

DeepSpeed configurations and accelerate files of {projects} public projects, {rows} files that differ, as they stand
there. Each was given to a run of a small model on two processes, with a recipe that agrees with it where it names
numbers (precision, batch, learning rate). What is refused was run by TRL alone as well (files that `accelerate launch`
itself ends on: by accelerate), to see whether the reason holds.

- ran: trained, and saved a whole model
- died: TRL or accelerate alone ends with an error, or without a model
- otherwise: TRL alone runs, and does not what the recipe says
- by rule: TRL alone runs here; the refusal is about GPUs, about several machines, or a rule of this repository

{ran} of {rows} run, {confirmed} are refused and die or do otherwise alone, {rule} are refused by rule; {died} that were
accepted died. Projects, paths, commits and licences: tests/helpers/public_configs.json. This page is generated:
`python scripts/public_configs.py --page`.

| project | licence | files | ran | refused, dies alone | refused, does otherwise | refused by rule | codes |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=200)
    options.add_argument("--page", action="store_true")
    chosen = options.parse_args()
    if not chosen.page:
        examine(chosen.seconds)
    PAGE.write_text(page(json.loads(public.TABLE.read_text())))
    print(f"written: {PAGE.relative_to(ROOT)}")


def examine(seconds: float) -> None:
    from tests.helpers.group import Group
    from tests.helpers.tiny import write_recipe

    rows = json.loads(public.TABLE.read_text()) if public.TABLE.is_file() else []
    known = {(row["project"], row["path"]) for row in rows}
    todo = [row for row in public.index() if (row["project"], row["path"]) not in known]
    folder = Path(tempfile.mkdtemp())
    recipe = write_recipe(folder, max_steps=2, save_model=True)
    groups, start = {1: Group(1), 2: Group(2)}, time.monotonic()
    try:
        for row in todo:
            if time.monotonic() - start > seconds:
                break
            shutil.rmtree(folder / "out", ignore_errors=True)
            rows.append(row | _examined(row, recipe, folder / "out", groups))
            public.TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        for group in groups.values():
            group.close()
        shutil.rmtree(folder)
    print(f"{len(rows)} of {len(rows) + len(todo)} or more files, {len(todo)} were left to do")


def _examined(row: dict, recipe: Path, out: Path, groups: dict) -> dict:
    """{"ended", "codes", and for what is refused "alone" and "said"}."""
    argv, environment, processes = public.launch_of(row, recipe, out)
    codes = public.codes_of(row, argv, environment)
    if environment is None:
        return {"ended": "refused", "codes": codes, "alone": "died", "said": _launch_error(row)}
    ended = _run(groups[processes], "ours_launched", argv, environment)
    found = {"ended": ended["ended"], "codes": codes}
    if ended["ended"] == "ran" and not codes:
        return found
    shutil.rmtree(out, ignore_errors=True)
    alone = _run(groups[processes], "plain_launched", argv, environment)
    if "ZR237" in codes:
        groups[processes].kill()  # AutoTP's groups stay in the process, and every later run would be cut
    said = f"{ended['said']} | {alone['said']}".replace(str(public.path_of(row)), Path(row["path"]).name)
    return found | {"alone": alone["ended"], "said": " ".join(said.replace(str(out.parent), ".").split())[:240]}


def _run(group, case: str, argv: list[str], environment: dict[str, str]) -> dict:
    from tests.helpers.group import CaseFailed

    try:
        ranks = group.run(f"public_cases.{case}", argv=argv, environment=environment)
    except CaseFailed as failed:
        group.kill()
        return {"ended": "died", "said": str(failed)[-200:]}
    return next((rank for rank in ranks if rank["ended"] != "ran"), ranks[0])


def _launch_error(row: dict) -> str:
    from zero_recipes.libs.accelerate_launch import environment_of_launch

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            environment_of_launch(public.path_of(row), 2)
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace(str(public.path_of(row)), Path(row["path"]).name)[:200]
    return ""


def page(rows: list[dict]) -> str:
    kinds = Counter(public.kind_of(row) for row in rows)
    projects = sorted({row["project"] for row in rows})
    text = INTRODUCTION.format(
        projects=len(projects),
        rows=len(rows),
        ran=kinds["ran"],
        confirmed=kinds["died alone"] + kinds["otherwise"],
        rule=kinds["by rule"],
        died=kinds["died"],
    )
    for project in projects:
        own = [row for row in rows if row["project"] == project]
        count = Counter(public.kind_of(row) for row in own)
        codes = sorted({code for row in own for code in row["codes"]})
        cells = [project, own[0]["license"], len(own)]
        cells += [count[kind] for kind in ("ran", "died alone", "otherwise", "by rule")]
        text += "| " + " | ".join(map(str, [*cells, ", ".join(codes)])) + " |\n"
    return text


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(ROOT)
    main()
