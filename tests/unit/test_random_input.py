"""Whatever a recipe, a ds_config or an accelerate file holds, `zero-recipes check` ends with findings, no traceback."""

import json
import math
import os
from contextlib import chdir

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.faults import SOUND_DS_CONFIG, SOUND_RECIPE, Side
from zero_recipes.checks.deepspeed_rules import BLOCKS
from zero_recipes.cli import main as cli
from zero_recipes.config.keys import key_types

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "no", "cpu", "nvme", "AdamW", "WarmupLR", "1e-5", "steps", math.nan, 10**40, "a\0b"])
)
values = st.recursive(
    leaves | st.dates() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
recipe_keys = st.sampled_from(sorted(key_types())) | st.sampled_from(sorted(yaml.safe_load(SOUND_RECIPE)))
ds_keys = st.sampled_from(sorted({*BLOCKS, *SOUND_DS_CONFIG} | {"optimizer", "scheduler", "train_batch_size"}))
ds_inner = st.sampled_from(["stage", "device", "offload_optimizer", "offload_param", "type", "params", "lr"])
ds_values = leaves | st.dictionaries(ds_inner, leaves | st.dictionaries(ds_inner, leaves, max_size=3), max_size=3)
accelerate_keys = st.sampled_from(
    ["distributed_type", "num_processes", "num_machines", "deepspeed_config", "mixed_precision", "use_cpu"]
)
draws = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def check(tmp_path, capsys):
    """The exit code of `zero-recipes check` on a recipe's, a ds_config's and an accelerate file's content."""
    Side().write(tmp_path)

    def exit_code(recipe: str, ds_config: str = "{}", *options: str, accelerate: object = None) -> int:
        (tmp_path / "recipe.yaml").write_bytes(recipe.encode(errors="surrogatepass"))
        (tmp_path / "ds.json").write_text(ds_config)
        (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(accelerate))
        kept = dict(os.environ)
        try:
            with chdir(tmp_path):
                return cli.main(["check", "recipe.yaml", *(options or ("--num_processes", "2"))])
        finally:
            os.environ.clear()
            os.environ.update(kept)
            capsys.readouterr()

    return exit_code


@draws
@given(st.dictionaries(recipe_keys, values, max_size=5))
def test_any_values_of_known_keys(check, keys):
    assert check(yaml.safe_dump(yaml.safe_load(SOUND_RECIPE) | keys)) in (0, 2)


@draws
@given(st.dictionaries(ds_keys, ds_values, max_size=4).map(lambda keys: json.dumps(SOUND_DS_CONFIG | keys)) | st.text())
def test_any_ds_config(check, text):
    assert check(SOUND_RECIPE + "deepspeed: ds.json\n", text) in (0, 2)


@draws
@given(st.dictionaries(accelerate_keys, values, max_size=4))
def test_any_accelerate_file(check, keys):
    assert check(SOUND_RECIPE, "{}", "--config_file", "accelerate.yaml", accelerate=keys) in (0, 2)
