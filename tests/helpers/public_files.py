"""Configurations of other projects, where they are at hand: FOLDER/index.json and FOLDER/KIND/PROJECT/PATH.

They are not in this repository. The index holds, for each file: project, path, commit, license (as GitHub's file says
it) and kind: "ds_config" or "accelerate". PROJECT is owner+name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

from tests.conftest import FIXTURES
from tests.helpers.public_cases import fitting

FOLDER = Path(os.environ.get("PUBLIC_CONFIGS", FIXTURES / "public_configs"))
TABLE = Path(__file__).with_name("public_configs.json")
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def index() -> list[dict]:
    """Empty where the files are not at hand."""
    file = FOLDER / "index.json"
    return json.loads(file.read_text()) if file.is_file() else []


def path_of(row: dict) -> Path:
    return FOLDER / row["kind"] / row["project"].replace("/", "+") / row["path"]


def launch_of(row: dict, recipe: Path, out: Path) -> tuple[list[str], dict[str, str] | None, int]:
    """(arguments of run_sft.py, what the launcher sets, processes): as the file's owner would start it, on two
    processes. None for the environment where accelerate itself ends on the file."""
    from tests.helpers.public_cases import set_by_launch

    path, argv = path_of(row), [str(recipe), "--output_dir", str(out)]
    if row["kind"] == "ds_config":
        try:
            config = json.loads(path.read_text())
        except ValueError:
            config = None
        return [*argv, "--deepspeed", str(path), *fitting(config)], {}, 2
    text = path.read_text()
    if "mixed_precision: fp16" in text or "mixed_precision: 'fp16'" in text:
        argv += ["--fp16", "true", "--bf16", "false"]
    for line in text.splitlines():
        key, _, value = line.strip().partition(": ")
        if key == "gradient_accumulation_steps" and value.isdigit() and int(value) <= 16:
            argv += ["--gradient_accumulation_steps", value]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            environment = set_by_launch(path, 2)
    except (Exception, SystemExit):
        return argv, None, 2
    alone = not any(name in environment for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
    return argv, environment, 1 if alone and "ACCELERATE_USE_CPU" in environment else 2


def codes_of(row: dict, argv: list[str], environment: dict[str, str] | None) -> list[str]:
    """Codes of the errors that `zero-recipes check` finds, with what the launch sets; sorted."""
    from zero_recipes.checks.preflight import preflight
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config.accelerate import launched_environment
    from zero_recipes.core.findings import Refusal
    from zero_recipes.libs.huggingface import launch_findings

    kept = dict(os.environ)
    try:
        path, overrides = recipes.split_command_line(argv)
        findings = []
        if row["kind"] == "accelerate":
            findings += launch_findings(path_of(row))
        if environment is None:
            environment = launched_environment(path_of(row), 2)
        else:
            environment = TWO | environment if "ACCELERATE_USE_CPU" not in environment else environment
        findings += preflight(path, recipes.read_recipe_file(path), overrides, environment, rehearsal=True)[1]
    except Refusal as refusal:
        findings = refusal.findings
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return sorted({finding.code for finding in findings if finding.level == "error"})
