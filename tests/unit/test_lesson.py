"""docs/lesson.md, its pictures and its notebook say what theory/ and the committed measurements say."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

from zero_recipes.config.recipe import read_recipe_file
from zero_recipes.theory.deepspeed_comm import volume_terms
from zero_recipes.theory.zero_paper import communication_units, model_state_bytes, plus_plus_units

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lesson.md"
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter"}


@cache
def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose() -> str:
    """The page without its generated tables, code and links' addresses."""
    page = re.sub(r"<!-- (\w+): begin.*?<!-- \1: end -->|```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|`[^`]*`|arXiv:[\d.]+", "", page)


def test_the_page_has_the_tables_of_its_script():
    page = PAGE.read_text()
    assert script("lesson_page").written(page) == page, "run python scripts/lesson_page.py"
    assert page.count("\n") < 400


def test_the_pictures_are_those_of_their_script():
    lesson = script("lesson_drawings")
    assert lesson.main(["--check"]) == 0, "run python scripts/lesson_drawings.py"
    named = re.findall(r"\]\(lesson/(\w+)\.svg\)", PAGE.read_text())
    assert sorted(named) == sorted(lesson.PICTURES) == sorted(p.stem for p in (ROOT / "docs" / "lesson").iterdir())


def test_the_pictures_and_the_notebook_have_the_models_sizes():
    states = json.loads((ROOT / "benchmarks" / "results" / "pythia_model_states.json").read_text())
    pythia = states["models"]["pythia-6.9b"]["parameters"]
    assert script("lesson_drawings").PSI == script("lesson_page").psi() == pythia
    tiny = json.loads((ROOT / "docs" / "demo" / "zero0" / "metrics.json").read_text())["parameters"]
    (pair,) = re.findall(r"for psi in \(([\d_]+), ([\d_]+)\)", json.loads(notebook_text()))
    assert tuple(map(int, pair)) == (tiny, pythia)


def notebook_text() -> str:
    notebook = json.loads((ROOT / "docs" / "lesson.ipynb").read_text())
    return json.dumps("".join("".join(cell["source"]) for cell in notebook["cells"]))


def test_tables_of_deepspeed_s_bytes_are_those_that_the_recipes_quote():
    strategies = json.loads((ROOT / "benchmarks" / "results" / "pythia_model_states.json").read_text())
    for stage in range(4):
        known = strategies["models"]["pythia-6.9b"]["strategies"][f"zero{stage}"]["deepspeed_bytes"]
        counters = 1552 if stage == 0 else 8
        assert script("lesson_page").deepspeed_bytes(2, stage) == pytest.approx(known, abs=counters)


def test_sizes_in_prose_are_few_and_true():
    """Each number with a unit or symbol that stands outside of a table, with where it comes from."""
    found = re.findall(r"\d[\d.,]*\s?(?:[GMTk]B|%|Ψ/N|Ψ|Φ)(?!\w)", prose())
    total = model_state_bytes(1, 1, 0).total
    by_theory = {f"{total:g}Ψ", f"{total:g}Ψ/N", "2Ψ", "12Ψ"}
    assert model_state_bytes(1, 1, 0) == (2, 2, 12)
    by_theory |= {f"{communication_units(stage)}Φ" for stage in range(4)}
    by_theory |= {f"{sum(volume_terms(stage, 1, kept=kept).values()):g}Φ" for stage in range(4) for kept in (0, 1)}
    by_theory |= {"20Ψ", "20Ψ/N"}  # test_twenty_bytes_at_the_fullest_moment
    assert set(found) - by_theory == {"80 GB"}
    assert int(80e9 / (2 * script("lesson_page").psi())) == 5, "five times over"
    assert 12 / total == 3 / 4, "three quarters"


def test_twenty_bytes_at_the_fullest_moment():
    """Of stage 0, and nearly of stage 3 for a small model of one large group of parameters."""
    model_state_terms = pytest.importorskip("zero_recipes.theory.deepspeed_memory").model_state_terms
    for stage, share in ((0, 1), (3, 2)):
        terms = model_state_terms([[1_000_000]], 2, 0, stage, 10**6)
        held = sum(sum(part.values()) for part in terms.values())
        assert held == pytest.approx(20 * 1_000_000 / share, rel=1e-4)
    settings = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())["zero_optimization"]
    names = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    assert {settings[name] for name in names} == {10**9}, "a billion"


def test_collectives_of_each_stage_are_those_that_were_measured():
    """In the picture, in the text of each stage, and in the runs of the demo."""
    lesson, section = script("lesson_drawings"), PAGE.read_text().partition("## One step at each stage")[2]
    told = {"2": {"all-reduce", "all-gather"}}  # "its gradients are reduced"; "the step is that of stage 1"
    for stage in range(4):
        run = json.loads((ROOT / "docs" / "demo" / f"zero{stage}" / "metrics.json").read_text())
        sent = {name.replace("_", "-") for name, size in run["communication_bytes_per_step"].items() if size > 100}
        assert {what for what, *_ in lesson.COLLECTIVES[stage]} == sent
        item = re.search(rf"\n- \*\*Stage {stage}\.\*\*(.*?)(?=\n- |\n\n)", section, flags=re.DOTALL)[1]
        said = {what for what in COLLECTIVES if what in item} | told.get(str(stage), set())
        if stage == 1:
            assert "The same up to the averaged gradients" in item
            said.add("all-reduce")
        assert said == sent


def test_zero_plus_plus_in_words_is_the_paper_s():
    assert plus_plus_units(hpz=False, qwz=True, qgz=False) == 1 / 2 + 1 / 2 + 1, "half of the bytes"
    assert plus_plus_units(hpz=True, qwz=False, qgz=False) == 3 - 1, "one of the two gathers"
    assert plus_plus_units(hpz=False, qwz=False, qgz=True) == 2 + 1 / 4, "a quarter"


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", PAGE.read_text())
    for target, anchor in targets:
        if target.startswith("https://"):
            assert re.fullmatch(r"https://arxiv.org/abs/\d{4}\.\d{4,5}", target)
            continue
        path = PAGE.parent / target
        assert path.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor[1:] in slugs, target + anchor


def test_the_bare_loop_is_short_and_has_the_recipe_s_settings():
    text = (ROOT / "docs" / "bare_loop.py").read_text()
    assert "zero_recipes" not in text, "a reader needs no helper of ours"
    lines = [line for line in text.partition('"""\n\n')[2].splitlines() if line.strip()]
    assert len([line for line in lines if not line.strip().startswith("#")]) <= 66
    recipe = read_recipe_file(ROOT / "recipes" / "tiny.yaml")
    assert f"lr={recipe['learning_rate']:g}".replace("0.0005", "5e-4") in text
    assert f'EACH = "tiny_world/base", "tiny_world/train.jsonl", {recipe["per_device_train_batch_size"]} ' in text
    assert f"num_warmup_steps={recipe['warmup_steps']}," in text and recipe["lr_scheduler_type"] == "cosine"
    assert f"manual_seed({recipe['seed']})" in text
    shown = re.search(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[1]
    known = {line.partition("  #")[0].strip() for line in text.splitlines()}
    assert [line for line in shown.splitlines() if line.strip() not in known] == []
