"""Whatever a recipe or a ds_config holds, `zero-recipes check` ends with findings, never with a traceback."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import chdir
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.bad_recipes import SOUND_DS_CONFIG, SOUND_RECIPE, Side
from tests.helpers.grid import first
from zero_recipes.checks.ds_config import BLOCKS
from zero_recipes.cli import main as cli
from zero_recipes.config import keys

# one test may draw twelve times, or eighty times under `make grid`
EXAMPLES = first(1, [12, 80])
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-10, 10)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "no", "true", "cpu", "nvme", "bfloat16", "AdamW", "WarmupLR", "1e-5", "steps"])
    | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 2**31, 2**63, -(2**63), 10**40, "none", "\ud83d", "a\0b"])
)
yaml_leaves = leaves | st.dates() | st.datetimes() | st.binary(max_size=4)
# scalars as a person may type them, whatever YAML makes of them
written = st.sampled_from(
    [
        *("2024-01-01", "2024-01-01 10:00:00", ".nan", "-.inf", "0x" + "f" * 5000, "9" * 5000, "1:30", "010", "1_000"),
        *('"\\ud800"', '"\\0"', "~", "yes", "!!binary aGk=", "!!set {a}", "!!python/none", "&a [*a]", "*nowhere"),
        *(
            "[" * 60 + "]" * 60,
            "{a: " * 60 + "1" + "}" * 60,
            "[" * 3000,
            "'",
            "%",
            "@",
            "|",
            ">-",
            "# nothing",
            "<<: 1",
        ),
        *("-1", "0", "0.5", "1e-5", "1e400", "-0.0", "null", "none", "{}", "[]", "[null]", "🙂", "é\u202e"),
    ]
) | st.text(max_size=12)
values = st.recursive(
    yaml_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
json_values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=6), leaves, max_size=3)
recipe_keys = st.sampled_from(sorted(keys.key_types())) | st.sampled_from(sorted(yaml.safe_load(SOUND_RECIPE)))
ds_keys = st.sampled_from(sorted(BLOCKS | set(SOUND_DS_CONFIG) | {"optimizer", "scheduler", "train_batch_size"}))
ZERO = ["stage", "device", "offload_optimizer", "offload_param", "zero_hpz_partition_size", "nvme_path"]
OTHERS = ["type", "params", "lr", "betas", "enabled", "total_num_steps", "warmup_num_steps", "thread_count"]
ds_inner = st.sampled_from(ZERO + OTHERS + ["reduce_bucket_size"])
accelerate_keys = st.sampled_from(
    [
        "distributed_type",
        "num_processes",
        "num_machines",
        "deepspeed_config",
        "mixed_precision",
        "use_cpu",
        "fsdp_config",
    ]
)
ds_values = leaves | st.dictionaries(ds_inner, leaves | st.dictionaries(ds_inner, leaves, max_size=3), max_size=3)


@pytest.fixture
def check(tmp_path, capsys):
    """The exit code of `zero-recipes check` on a recipe's and a ds_config's text."""
    Side().write(tmp_path)

    def exit_code(recipe: str, ds_config: str, *options: str) -> int:
        (tmp_path / "recipe.yaml").write_bytes(recipe.encode(errors="surrogatepass"))
        (tmp_path / "ds.json").write_text(ds_config)
        kept = dict(os.environ)
        try:
            with chdir(tmp_path):
                return cli.main(["check", "recipe.yaml", *(options or ("--num_processes", "2"))])
        finally:
            os.environ.clear()
            os.environ.update(kept)
            capsys.readouterr()

    return exit_code


def every(strategy: st.SearchStrategy, examples: int, holds: Callable[[Any], bool]) -> None:
    """`holds` is true of `examples` draws, the same in every run."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def drawn(value):
        assert holds(value)

    drawn()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_text(check, examples):
    every(st.text(max_size=60), examples, lambda text: check(text, "{}") in (0, 2))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_values_of_known_keys(check, examples):
    def holds(keys):
        return check(yaml.safe_dump(yaml.safe_load(SOUND_RECIPE) | keys), "{}") in (0, 2)

    every(st.dictionaries(recipe_keys, values, max_size=5), examples, holds)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_lines(check, examples):
    """Some replace those of the sound recipe, some stand beside them: a key twice."""

    def holds(lines):
        text = SOUND_RECIPE + "".join(f"{key}: {value}\n" for key, value in lines)
        return check(text, "{}") in (0, 2)

    every(st.lists(st.tuples(recipe_keys | st.text(max_size=6), written), max_size=4), examples, holds)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_word_on_the_command_line(check, examples):
    words = ["null", "nan", "-1", "1e400", "{", '{"a": 1}', "[", "", "\udc80", "9" * 5000, "none"]

    def holds(drawn):
        key, word = drawn
        return check(SOUND_RECIPE, "{}", "--num_processes", "2", f"--{key}", word) in (0, 2)

    every(st.tuples(recipe_keys, st.sampled_from(words)), examples, holds)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_ds_config(check, examples):
    def holds(keys):
        return check(SOUND_RECIPE + "deepspeed: ds.json\n", json.dumps(SOUND_DS_CONFIG | keys)) in (0, 2)

    every(st.dictionaries(ds_keys, ds_values, max_size=4), examples, holds)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_json(check, examples):
    def holds(text):
        return check(SOUND_RECIPE + "deepspeed: ds.json\n", text) in (0, 2)

    every(st.text(max_size=30) | json_values.map(json.dumps), examples, holds)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_accelerate_file(check, tmp_path, examples):
    def holds(keys):
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(keys))
        return check(SOUND_RECIPE, "{}", "--config_file", "accelerate.yaml") in (0, 2)

    every(st.dictionaries(accelerate_keys, values, max_size=4), examples, holds)
