"""Finding codes: one for each place, all in the table, explained; and which of them a recipe may ignore."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.bad_recipes import FAULTS, Side, findings_of, schedule
from tests.helpers.known_bad import CASES
from zero_recipes.cli import main as cli
from zero_recipes.core import codes
from zero_recipes.core.errors import Finding, downgraded, raise_errors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def in_source():
    """The code of each place that makes a finding."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import checks_page
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return [code for code, _, _ in checks_page.findings_in_source()]


def test_a_code_is_one_place_and_the_table_has_them_all(in_source):
    assert len(in_source) == len(set(in_source)), sorted(code for code in in_source if in_source.count(code) > 1)
    assert set(in_source) == set(codes.table())


def test_no_code_stands_anywhere_but_where_its_finding_is_made(in_source):
    """A finding that the script does not see would have no row in the table."""
    written = set()
    for path in (ROOT / "zero_recipes").rglob("*.py"):
        if path.name not in ("codes.py", "explain.py"):
            written |= set(re.findall(r'"(ZR\d{3})"', path.read_text()))
    assert written == set(in_source)


def test_every_code_is_explained_in_words():
    for code, row in codes.table().items():
        assert re.fullmatch(r"ZR[1-8]\d\d", code) and row["area"] == codes.AREAS[code[2]]
        for part in ("what", "why", "fix"):
            assert re.search(r"[a-z]{2}", row[part]), (code, part)
            assert not re.search(r"[{}]\w+[}(]|<[^>]*[.()\[]", row[part]), (code, row[part])
    for digit in "124":
        lacking = [code for code, row in codes.table().items() if code[2] == digit and "example" not in row]
        assert lacking == []


def test_the_tests_cases_are_of_codes_in_the_table():
    used = {fault.code for fault in FAULTS} | {case[2] for case in CASES.values()}
    assert used <= set(codes.table()) and len(used) > 120


def test_explain_prints_what_why_fix_and_an_example(capsys):
    assert cli.main(["explain", "zr223"]) == 0
    row, text = codes.table()["ZR223"], capsys.readouterr().out
    assert all(part in text for part in (row["what"], row["why"], row["fix"], "zero_hpz_partition_size: 8"))
    assert codes.IGNORABLE["ZR223"] in text
    assert cli.main(["explain"]) == 0
    text = capsys.readouterr().out
    assert all(area in text for area in codes.AREAS.values())


def test_an_unknown_code_has_near_ones(capsys):
    assert cli.main(["explain", "ZR299"]) == 2
    assert "ZR301" in capsys.readouterr().err
    assert cli.main(["explain", "nonsense"]) == 2


def test_ignorable_codes_are_errors_with_a_reason():
    assert set(codes.IGNORABLE) <= set(codes.table())
    assert all(codes.IGNORABLE.values())
    assert {codes.table()[code]["level"] for code in codes.IGNORABLE} <= {"error", "error or warning"}


def test_an_ignored_error_is_a_warning_and_others_stay():
    findings = [Finding("ZR608", "a", "b", "c"), Finding("ZR215", "a", "b", "c")]
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


def test_check_counts_ignored_errors_as_warnings(tmp_path, capsys, monkeypatch):
    recipe, *_ = Side(ds={"pipeline": {"stages": 2}}).write(tmp_path / "case")
    monkeypatch.chdir(tmp_path / "case")
    assert cli.main(["check", recipe, "--num_processes", "2"]) == 2
    assert cli.main(["check", recipe, "--num_processes", "2", "--ignore", "ZR239"]) == 0
    assert capsys.readouterr().out.endswith("0 errors, 1 warnings\n")


def test_the_page_is_short_and_names_no_file_of_ours():
    page = (ROOT / "docs" / "checks.md").read_text()
    codes = json.loads((ROOT / "zero_recipes/core/codes.json").read_text())
    assert len(page.splitlines()) <= len(codes) + 50, "a line a code"
    assert codes.keys() == set(re.findall(r"^\| (ZR\d{3})", page, re.MULTILINE))
    assert not re.search(r"zero_recipes/\S+\.py", page)
