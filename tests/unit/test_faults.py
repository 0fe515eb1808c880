"""Every fault of the table is found, by its code, and its fixed twin passes."""

import pytest
import yaml

from tests.helpers.faults import FAULTS, Side, findings_of
from zero_recipes.checks.rules import options
from zero_recipes.cli import main as cli

SOUND: set[str] = set()  # twins without a finding


def text_of(fault) -> str:
    rules = options()["stops_late"] | options()["silent"]
    return rules[fault.names]["option"] if fault.code in ("ZR192", "ZR193") else fault.names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_found_and_its_fixed_twin_passes(fault, tmp_path):
    found = findings_of(fault.bad, tmp_path / "bad")
    assert all(finding.why and finding.fix for finding in found)
    named = [f for f in found if f.code == fault.code and f.level == fault.level and text_of(fault) in str(f.what)]
    assert named, [str(finding) for finding in found]
    if repr(fault.fixed) not in SOUND:  # many faults have the same twin
        fixed = findings_of(fault.fixed, tmp_path / "fixed")
        whole = fault.fixed.keys is None  # elsewhere other rules may find something about the GPUs that are not here
        assert fixed == [] if whole else [f for f in fixed if f.what == named[0].what] == [], [str(f) for f in fixed]
        SOUND.add(repr(fault.fixed) if whole else "")
    if fault.bad.keys is None:
        assert {f.code for f in found if f.level == fault.level} == {fault.code}, [str(finding) for finding in found]


def test_every_rule_of_options_has_its_fault():
    rules = options()["stops_late"].keys() | options()["silent"].keys()
    without_model = {"lora_template"}  # tests/unit/test_rules.py: it needs a model with tied embeddings
    assert {fault.names for fault in FAULTS if fault.code in ("ZR192", "ZR193")} == rules - without_model
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


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
