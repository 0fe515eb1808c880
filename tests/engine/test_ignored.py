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
