"""docs/symptoms.md: its commands parse, its codes exist in the named area, its quotes stand in the source."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import recipe
from zero_recipes.core.findings import described, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "symptoms.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.strip()]
COMMANDS = [shlex.split(line, comments=True) for line in LINES if line.startswith("zero-recipes")]
QUOTES = {  # words of the page: the package and file that print them
    "out of memory.": "accelerate/utils/memory.py",
    "DefaultCPUAllocator: can't allocate memory": "accelerate/utils/memory.py",
    "a process was killed by": "zero_recipes/metrics/failure.py",
    "in vain for all": "zero_recipes/distributed/rendezvous.py",
    "pytorch allocator cache flushes since last step": "deepspeed/runtime/zero/stage3.py",
    "[deepspeed] OVERFLOW!": "deepspeed/runtime/fp16/loss_scaler.py",
    "Current loss scale already at minimum": "deepspeed/runtime/fp16/loss_scaler.py",
    "steps were skipped": "zero_recipes/training/divergence.py",
    "the training has diverged": "zero_recipes/training/divergence.py",
    "size mismatch for": "torch/nn/modules/module.py",
    "is not whole": "zero_recipes/checkpoint/saved_files.py",
    "Automatic adjustment of ZeRO's optimizer state partitioning": "deepspeed/runtime/engine.py",
    "ChildFailedError": "torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "Connection closed by peer": "zero_recipes/metrics/failure.py",
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_are_taken(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = cli.parse_arguments(command[1:])
    assert arguments.verb == command[1] and callable(arguments.func)
    named = getattr(arguments, "recipe", None)
    if named is not None:
        recipe.parse_recipe(named, recipe.read_recipe_file(named), arguments.overrides)
    for key in re.findall(r"--set (?:zero_optimization\.)?(\w+)=", " ".join(command)):
        assert key in PAGE
    for word in command:
        assert not word.endswith(".yaml") or (ROOT / word).is_file()


def test_every_symptom_has_a_command_causes_and_codes():
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 10
    for section in sections:
        assert "```bash" in section and "zero-recipes" in section and "You see" in section, section[:40]
        assert re.search(r"\[ZR\d{3}\]", section), section[:40]


def test_codes_exist_and_links_lead_to_their_area():
    areas = set(re.findall(r"^## (.+)$", (ROOT / "docs" / "checks.md").read_text(), re.MULTILINE))
    anchors = {re.sub(r"\s", "-", area.lower()) for area in areas}
    links = re.findall(r"\[(ZR\d{3})\]\(checks\.md#([\w-]+)\)", PAGE)
    assert len(links) > 30 and {anchor for _, anchor in links} <= anchors
    for code, anchor in links:
        assert described(code)["area"].lower().replace(" ", "-") == anchor, code
    assert set(re.findall(r"ZR\d{3}", PAGE)) <= set(table())


@pytest.mark.parametrize(("words", "file"), QUOTES.items(), ids=QUOTES)
def test_what_is_quoted_is_what_is_printed(words, file):
    assert words in " ".join(PAGE.split())
    package, _, inside = file.partition("/")
    source = Path(importlib.util.find_spec(package).submodule_search_locations[0]) / inside
    assert words in re.sub(r'"\s*\\?\s*f?"', "", source.read_text()), f"{file} prints other words now"


def test_the_systems_own_words():
    assert os.strerror(errno.ENOSPC) == "No space left on device" and "No space left on device" in PAGE


def test_fields_of_metrics_exist():
    fields = (ROOT / "docs" / "metrics.md").read_text()
    for name in ("memory_phases", "peak_memory_bytes", "engine_seconds", "phase_seconds", "step_seconds", "network",
                 "nvme", "host_device_bytes_per_second", "grad_norm_history"):  # fmt: skip
        assert f"`{name}`" in PAGE and f"`{name}" in fields


def test_phases_are_those_of_metrics():
    fields = (ROOT / "docs" / "metrics.md").read_text()
    for phase in ("model", "train", "save"):
        assert re.search(rf"^\| .*`{phase}`", PAGE, re.MULTILINE) and f"`phase_seconds.{phase}`" in fields
