"""What each tracker has written of a run, read back from its own files. tensorboard is installed with the tests."""

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.helpers.tiny import write_recipe

NAMES = ("loss", "tokens_per_second", "peak_memory_bytes", "communication_bytes_per_step")


def tensorboard(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [event.value for event in events.Scalars(f"train/{name}")] for name in NAMES}


def wandb(folder: Path) -> dict[str, list[float]]:
    """Each value stands behind its name in the log, of the history and of the summary; wandb 0.31 has no reader."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    log, pattern = path.read_bytes(), rb"train/%s\x82\x01.([\d.e+-]+)"
    return {name: [float(value) for value in re.findall(pattern % name.encode(), log, re.DOTALL)] for name in NAMES}


def trackio(folder: Path) -> dict[str, list[float]]:
    (path,) = (folder / "trackio").glob("*.db")
    rows = [json.loads(row) for (row,) in sqlite3.connect(path).execute("select metrics from metrics order by id")]
    return {name: [row[f"train/{name}"] for row in rows if f"train/{name}" in row] for name in NAMES}


@pytest.mark.parametrize("read", [tensorboard, wandb, trackio], ids=lambda read: read.__name__)
def test_a_tracker_has_speed_memory_and_communication_of_each_step(two, tmp_path, read):
    pytest.importorskip(read.__name__)
    places = {"TENSORBOARD_LOGGING_DIR": "tensorboard", "WANDB_DIR": "", "TRACKIO_DIR": "trackio"}
    environment = {name: str(tmp_path / folder) for name, folder in places.items()}
    recipe = write_recipe(tmp_path, report_to=read.__name__, env=environment | {"WANDB_MODE": "offline"})
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero2.json"]
    metrics = two.run("train", argv=argv)[0]["metrics"]
    found = read(tmp_path)
    assert found["loss"] == pytest.approx(metrics["loss_history"], rel=1e-3)
    assert set(found["communication_bytes_per_step"][1:]) == {sum(metrics["communication_bytes_per_step"].values())}
    assert all(min(values) > 0 for values in found.values()), found
