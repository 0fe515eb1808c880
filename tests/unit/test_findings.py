"""Finding codes: one for each place, all in the table, explained; and which of them a recipe may ignore."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.faults import Side, findings_of, schedule
from zero_recipes.cli import main as cli
from zero_recipes.core.findings import AREAS, Finding, described, downgraded, raise_errors, table

ROOT = Path(__file__).resolve().parents[2]


PLACEHOLDER = re.compile(r"{(\w+)[^{}]*}")


@pytest.fixture(scope="module")
def in_source():
    """[(code, names that its call fills in)] of each place that makes a finding."""
    calls = []
    for path in sorted((ROOT / "zero_recipes").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and call.args and re.fullmatch(r"'ZR\d{3}'", ast.unparse(call.args[0])):
                calls.append((ast.literal_eval(call.args[0]), {keyword.arg for keyword in call.keywords}))
    return calls


def test_each_code_is_made_in_one_place_which_fills_in_its_placeholders(in_source):
    codes = [code for code, _ in in_source]
    assert sorted(codes) == sorted(table())
    for code, filled in in_source:
        row = table()[code]
        named = set(PLACEHOLDER.findall(" ".join(row[part] for part in ("what", "why", "fix")).replace("{{", "")))
        passed_on = None in filled or "cause" in named  # by `**values`
        assert passed_on or named == filled - {"level", "scope", "recipe_key"}, code


def test_explain_prints_what_why_fix_and_an_example(capsys):
    assert cli.main(["explain", "zr226"]) == 0
    row, text = described("ZR226"), capsys.readouterr().out
    assert all(part in text for part in (row["what"], row["why"], row["fix"], "zero_quantized_weights"))
    assert row["ignore"] in text and "{" not in row["what"] + row["why"] + row["fix"]
    assert cli.main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all(area in text for area in AREAS.values())


def test_an_ignored_error_is_a_warning_and_others_stay():
    findings = [Finding("ZR608", "a", "b", "c"), Finding("ZR206", "a", "b", "c")]
    ignored, kept = downgraded(findings, {"ZR608"})
    assert (ignored.level, ignored.ignored) == ("warning", True) and kept == findings[1]
    assert str(ignored).startswith("warning (ignored): a [ZR608]")
    raise_errors([ignored])


@pytest.mark.parametrize(
    "given, code",
    [
        ({"ds": schedule(1000), "recipe": "warmup_steps: 1000\nignore: [ZR217]"}, "ZR217"),
        (
            {"ds": {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "recipe": "ignore: ZR226"},
            "ZR226",
        ),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "zr239,ZR608")}, "ZR239"),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "ZR608", "ZR239")}, "ZR239"),
    ],
    ids=["a list", "text", "by comma", "several words"],
)
def test_a_run_goes_on_with_what_its_recipe_ignores(tmp_path, given, code):
    (found,) = findings_of(Side(**given), tmp_path / "case")
    assert (found.code, found.level, found.ignored) == (code, "warning", True)
