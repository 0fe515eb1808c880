"""What a tracker has written of a run, read back from its own file."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.tiny import arguments, write_recipe


def test_tensorboard_has_speed_memory_and_communication_of_each_step(two, tmp_path):
    environment = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "written")}
    recipe = write_recipe(tmp_path, report_to="tensorboard", env=environment)
    metrics = two.run("train", argv=arguments(recipe, "zero2", tmp_path / "out"))[0]["metrics"]
    events = EventAccumulator(str(tmp_path / "written")).Reload()
    names = ("loss", "tokens_per_second", "peak_memory_bytes", "communication_bytes_per_step")
    found = {name: [event.value for event in events.Scalars(f"train/{name}")] for name in names}
    assert found["loss"] == pytest.approx(metrics["loss_history"], rel=1e-3)
    assert set(found["communication_bytes_per_step"][1:]) == {sum(metrics["communication_bytes_per_step"].values())}
    assert all(min(values) > 0 for values in found.values()), found
