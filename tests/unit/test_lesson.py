"""docs/lesson.md: its tables, pictures and every figure with a unit come from theory or from committed JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from scripts import lesson_drawings, lesson_page
from zero_recipes.core import units
from zero_recipes.core.hardware import OWN
from zero_recipes.theory.deepspeed_comm import volume_terms
from zero_recipes.theory.lower_bounds import resumable_bytes
from zero_recipes.theory.zero_paper import STAGES, model_state_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "lesson.md").read_text()
PROSE = re.sub(r"```.*?```|<!-- (\w+): begin.*?<!-- \1: end -->", "", PAGE, flags=re.S)
PSI = lesson_page.parameters()


def figures() -> set[str]:
    """Numbers of bytes, parameters and times in the text between the tables."""
    found = re.findall(r"(\d[\d.]*)\s(GB|TB|MB|billion|million)", PROSE)
    return {" ".join(each) for each in found}


def test_the_tables_are_what_theory_and_json_say():
    assert lesson_page.main(["--check"]) == 0, "run python scripts/lesson_page.py"


def test_the_pictures_are_what_theory_says():
    assert lesson_drawings.main(["--check"]) == 0, "run python scripts/lesson_drawings.py"
    assert lesson_drawings.PSI == PSI


def test_every_figure_of_the_text_is_computed_again():
    demo = json.loads(lesson_page.DEMO.read_text())["rows"][0]["parameters"]
    offloaded = lesson_page.result("zero_family")["offload"]["zero2"]["parameters"]
    computed = {
        f"{PSI / 1e9:.2f} billion", units.size(2 * PSI), units.size(model_state_bytes(PSI, 1, 0).total),
        f"{demo / 1e6:.2f} million", f"{offloaded / 1e6:.1f} million", units.size(2 * 5e8),
    }  # fmt: skip
    named = {"1 GB", "24 GB", "80 GB"}  # the unit itself, and two cards by their names
    assert figures() == computed | named | {"50 GB"}  # the network's is held below


def test_what_a_network_gives_each_gpu_is_in_the_hardware_table():
    table = yaml.safe_load(OWN.read_text())
    assert (table["a100-80gb"]["network_gb_s"], table["h100-80gb"]["network_gb_s"]) == (25, 50)
    assert "25 to 50\nGB/s" in PAGE


def test_the_stages_are_the_papers():
    for world in (2, 3, 8, 1000):
        terms = [16, 4 + 12 / world, 2 + 14 / world, 16 / world]
        for stage, each in zip(STAGES, terms, strict=True):
            assert model_state_bytes(10**6, world, stage).total == pytest.approx(each * 10**6)
    saved = [model_state_bytes(PSI, 2, 0).total / model_state_bytes(PSI, 2, stage).total for stage in (1, 2, 3)]
    assert "{:.1f}, {:.1f} and {:.1f} times".format(*saved) in PAGE
    limits = [16 / model_state_bytes(10**6, 10**6, stage).total * 10**6 for stage in (1, 2)]
    assert [round(limit, 3) for limit in limits] == [4, 8]
    assert sum(each for _, _, each, _ in lesson_page.COMPONENTS) == 16


def test_what_deepspeed_holds_and_sends_is_what_its_terms_say():
    zero0 = lesson_page.result("pythia_model_states")["models"]["pythia-6.9b"]["strategies"]["zero0"]
    assert round(zero0["deepspeed_bytes"] / PSI, 3) == 20 and "20Ψ" in PAGE
    for stage, micro_batches, kept, whole in ((0, 1, True, 2), (1, 4, True, 3), (2, 4, True, 9), (3, 1, False, 3)):
        assert sum(volume_terms(stage, micro_batches, kept=kept).values()) == whole
    assert sum(volume_terms(3, 1, kept=True).values()) == 2
    assert sum(volume_terms(2, 1, multi_rank_buckets=False).values()) == 2
    assert [resumable_bytes(2, 12, stage) for stage in (1, 2, 3)] == [16, 16, 14]


def test_bf16_loses_what_the_text_says_it_loses():
    one = torch.tensor(1.0, dtype=torch.bfloat16)
    assert one + torch.tensor(0.0001, dtype=torch.bfloat16) == one
    assert f"{1 + torch.finfo(torch.bfloat16).eps:.4f}" == "1.0078"


def test_losses_in_fp32_agree_to_six_digits():
    apart = lesson_page.result("equivalence")["deltas"]["loss"]
    assert max(apart.values()) < 1e-6 and "six digits" in PAGE


def test_the_lesson_and_its_loop_are_short():
    assert len(PAGE.splitlines()) < 400
    code = [line for line in (ROOT / "docs" / "bare_loop.py").read_text().splitlines() if line.strip()]
    assert len([line for line in code if not line.strip().startswith(("#", '"""'))]) <= 60
