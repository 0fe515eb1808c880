"""Every fault of the table is found, by its code, and its fixed twin passes; which findings a recipe may ignore."""

import ast
import re

import pytest
import yaml

from tests.helpers.faults import FAULTS, ROOT, Side, findings_of, schedule
from zero_recipes.checks.rules import options
from zero_recipes.cli import main as cli
from zero_recipes.core.findings import AREAS, Finding, described, downgraded, raise_errors, table

SOUND: set[tuple[str, bool]] = set()  # twins without a finding


def text_of(fault) -> str:
    rules = options()["stops_late"] | options()["silent"]
    return rules[fault.names]["option"] if fault.code in ("ZR192", "ZR193") else fault.names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_found_and_its_fixed_twin_passes(fault, tmp_path):
    data = fault.code.startswith("ZR5")  # what is found in rows and splits
    found = findings_of(fault.bad, tmp_path / "bad", data)
    assert all(finding.why and finding.fix for finding in found)
    named = [f for f in found if f.code == fault.code and f.level == fault.level and text_of(fault) in str(f.what)]
    assert named, [str(finding) for finding in found]
    if (repr(fault.fixed), data) not in SOUND:  # many faults have the same twin
        fixed = findings_of(fault.fixed, tmp_path / "fixed", data)
        whole = fault.fixed.keys is None  # elsewhere other rules may find something about the GPUs that are not here
        assert fixed == [] if whole else [f for f in fixed if f.what == named[0].what] == [], [str(f) for f in fixed]
        SOUND.add((repr(fault.fixed) if whole else "", data))
    if fault.bad.keys is None:
        assert {f.code for f in found if f.level == fault.level} == {fault.code}, [str(finding) for finding in found]


def test_the_net_has_the_librarys_message_the_key_and_the_traceback(tmp_path, monkeypatch, capsys):
    Side(recipe="dataloader_persistent_workers: true\noptim_args: sparkle").write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == 2
    plain = capsys.readouterr().out
    assert plain.count("[ZR199]") == 2 and "Traceback" not in plain
    assert "persistent_workers option needs num_workers > 0" in plain
    assert cli.main(["check", "recipe.yaml", "--traceback"]) == 2
    whole = capsys.readouterr().out
    assert whole.count("Traceback") == 2 and "torch/utils/data/dataloader.py" in whole
    (finding,) = findings_of(Side(recipe="packing: true\nmax_length: null"), tmp_path / "packing")
    assert finding.key in ("packing", "max_length") and "`max_length` can't be `None`" in finding.why


def test_all_findings_come_at_once_with_their_lines(tmp_path, monkeypatch, capsys):
    keys = {"torch_dtype": "bfloat16", "learning_rate": [1e-5], "lerning_rate": 1e-5, "global_batch_size": 7}
    Side(recipe=yaml.safe_dump(keys, sort_keys=False), without=("gradient_accumulation_steps",)).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml", "--num_processes", "2"]) == 2
    lines = capsys.readouterr().out.splitlines()
    for code, line in (("ZR101", 12), ("ZR107", 13), ("ZR103", 15), ("ZR121", None)):
        (text,) = [text for text in lines if text.endswith(f"[{code}]")]
        assert line is None or f"recipe.yaml:{line}" in text, text
    assert lines[0] == "recipe.yaml cannot run: 4 errors, 0 warnings"


def test_each_code_is_made_in_one_place_which_fills_in_its_placeholders():
    calls = []  # (code, names that its call fills in)
    for path in sorted((ROOT / "zero_recipes").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            code = getattr(call.args[0], "value", None) if isinstance(call, ast.Call) and call.args else None
            if isinstance(code, str) and re.fullmatch(r"ZR\d{3}", code):
                calls.append((code, {keyword.arg for keyword in call.keywords}))
    assert sorted(code for code, _ in calls) == sorted(table())
    for code, filled in calls:
        text = " ".join(table()[code][part] for part in ("what", "why", "fix")).replace("{{", "")
        named = set(re.findall(r"{(\w+)[^{}]*}", text))
        passed_on = None in filled or "cause" in named  # by `**values`
        assert passed_on or named == filled - {"level", "scope", "recipe_key"}, code


def test_explain_prints_what_why_fix_and_an_example(capsys):
    assert cli.main(["explain", "zr226"]) == cli.main(["explain"]) == 0
    row, text = described("ZR226"), capsys.readouterr().out
    assert all(row[part] in text for part in ("what", "why", "fix", "ignore")) and "zero_quantized_weights" in text
    assert all(area in text for area in AREAS.values()) and "{" not in row["what"] + row["why"] + row["fix"]


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
        ({"ds": {"pipeline": {"stages": 2}}, "recipe": "ignore: ZR239"}, "ZR239"),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "zr239,ZR608")}, "ZR239"),
        ({"ds": {"pipeline": {"stages": 2}}, "overrides": ("--ignore", "ZR608", "ZR239")}, "ZR239"),
    ],
    ids=["a list", "text", "by comma", "several words"],
)
def test_a_run_goes_on_with_what_its_recipe_ignores(tmp_path, given, code):
    (found,) = findings_of(Side(**given), tmp_path / "case")
    assert (found.code, found.level, found.ignored) == (code, "warning", True)
