"""A recipe means what TRL's own reader makes of it; what its keys cannot mean is refused with code and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from zero_recipes.checks import recipe_findings
from zero_recipes.config import recipe as recipes
from zero_recipes.config import recipe_keys


def test_a_key_that_stands_twice_inside_a_key_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nlr_scheduler_kwargs:\n  min_lr: 1\n  min_lr: 2\n")
    with pytest.raises(recipes.Refusal, match=r"`min_lr` .* lines 3 and 4") as refused:
        recipes.read_recipe_file(path)
    assert refused.value.codes == ["ZR126"]


@pytest.mark.parametrize("text", [b"seed: \xff\n", b"run_name: 2024-13-45\n", b"seed: !!int x\n", b"? [1\n"])
def test_what_is_no_yaml_is_refused(tmp_path, text):
    (tmp_path / "r.yaml").write_bytes(text)
    with pytest.raises(recipes.Refusal) as refused:
        recipes.read_recipe_file(tmp_path / "r.yaml")
    assert refused.value.codes == ["ZR117"]


YAML_1_1 = """\
base: &base {a: 1, b: [x, on]}
over: {<<: *base, a: 2}
<<: *base
rate: 1e-5
other: 1.0e-5
y: y
date: 2024-01-01
octal: 010
sixty: 1:30
switch: [yes, no, off, True, ~]
text: |
  a: 1
   b
"""


@pytest.mark.parametrize("path", [*sorted(Path("recipes").glob("*.yaml")), None], ids=str)
def test_a_recipe_means_what_trls_reader_makes_of_it(tmp_path, path):
    """TRL reads it by PyYAML's safe_load (trl/scripts/utils.py, parse_args_and_config)."""
    if path is None:
        path = tmp_path / "r.yaml"
        path.write_text(YAML_1_1)
    mapping = recipes.read_recipe_file(path)
    meant = yaml.safe_load(path.read_text())
    meant.pop("env", None)
    assert repr(dict(mapping)) == repr(meant)
    lines = path.read_text().splitlines()
    assert all(lines[line - 1].startswith(key) for key, line in mapping.lines.items())


@pytest.mark.parametrize(
    "line, codes",
    [
        ("max_steps: 1.5", ["ZR111"]),
        ("max_steps: true", ["ZR107"]),
        ("max_steps: '1.5'", ["ZR112"]),
        ("max_steps: '15'", []),
        ("packing: 1", ["ZR111"]),
        ("packing: 'on'", []),
        ("packing: maybe", ["ZR112"]),
        ("run_name: 2024-01-01", ["ZR111"]),
        ("report_to: {none: 1}", ["ZR110"]),
        ("report_to: [no]", ["ZR141"]),
        ("label_names: [labels, 5]", ["ZR141"]),
        ("debug: [underflow_overflow]", []),
        ("liger_kernel_config: {rope: fast}", ["ZR141"]),
        ("pad_to_multiple_of: true", ["ZR106"]),
        ("datasets: [{path: a, split: 5}]", ["ZR108"]),
        ("datasets: [{name: a}]", ["ZR108"]),
        ("warmup_steps: 3", []),
        ("warmup_steps: .inf", []),
        ("output_dir:", []),
        ("seed:", ["ZR105"]),
    ],
)
def test_a_value_that_the_keys_type_cannot_mean(tmp_path, line, codes):
    path = tmp_path / "r.yaml"
    path.write_text(line)
    found = recipe_findings(
        "r.yaml", recipes.read_recipe_file(path), {}, recipe_keys.key_types(), recipe_keys.key_choices()
    )
    assert [finding.code for finding in found] == codes
