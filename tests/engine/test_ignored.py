"""What a recipe may ignore: the run goes on, with the losses of the run without it."""

from __future__ import annotations

import pytest

from tests.helpers.faults import argv_of, ds_config
from tests.helpers.grid import first

# code: the DeepSpeed configuration that it is about, and the same without it
WITHOUT_EFFECT = {
    "ZR226": (ds_config(2, zero_quantized_weights=True, zero_quantized_gradients=True), ds_config(2)),
    "ZR239": (ds_config(1) | {"pipeline": {"stages": 2}}, ds_config(1)),
}


@pytest.mark.parametrize("code", first(1, WITHOUT_EFFECT))
def test_an_ignored_option_changes_nothing(two, tmp_path, code):
    bad, fixed = WITHOUT_EFFECT[code]
    runs = []
    for config, keys in ((bad, {"ignore": [code]}), (fixed, {})):
        argv = argv_of(tmp_path, deepspeed=config, overwrite=True, **keys)
        runs.append(two.run("train", argv=argv)[0]["metrics"])
    assert [run["status"] for run in runs] == ["ok", "ok"]
    assert runs[0]["loss_history"] == runs[1]["loss_history"]


def test_without_ignore_the_run_is_refused(two, tmp_path):
    argv = argv_of(tmp_path, deepspeed=WITHOUT_EFFECT["ZR239"][0])
    assert all("[ZR239]" in said for said in two.run("refusal_of", argv=argv))


def test_an_ignored_schedule_is_the_one_that_is_written(two, tmp_path):
    """A warm-up of 1000 steps in a run of a few: the learning rate stays near 0, and the run ends well."""
    warm_up = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "linear"}
    config = ds_config(2) | {"scheduler": {"type": "WarmupLR", "params": warm_up}}
    keys = {"warmup_steps": 1000, "learning_rate": 1e-3, "ignore": ["ZR217"]}
    metrics = two.run("train", argv=argv_of(tmp_path, deepspeed=config, **keys))[0]["metrics"]
    assert metrics["status"] == "ok"
