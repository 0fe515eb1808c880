"""What a tracker has written of a run, read back from its own file."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.tiny import arguments, write_recipe


def of_tensorboard(address: str, name: str) -> list[float]:
    events = EventAccumulator(address).Reload()
    return [event.value for event in events.Scalars(f"train/{name}")]


def of_mlflow(address: str, name: str) -> list[float]:
    from mlflow import MlflowClient

    client = MlflowClient(address)
    (run,) = client.search_runs(["0"])
    return [metric.value for metric in client.get_metric_history(run.info.run_id, name)]


TRACKERS = {
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", "", of_tensorboard),
    "mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///", of_mlflow),
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_has_speed_memory_and_communication_of_each_step(two, tmp_path, name):
    pytest.importorskip(name)
    variable, scheme, values_of = TRACKERS[name]
    address = f"{scheme}{tmp_path / 'written'}"
    recipe = write_recipe(tmp_path, report_to=name, env={variable: address})
    metrics = two.run("train", argv=arguments(recipe, "zero2", tmp_path / "out"))[0]["metrics"]
    names = ("loss", "tokens_per_second", "peak_memory_bytes", "communication_bytes_per_step")
    found = {name: values_of(address, name) for name in names}
    assert found["loss"] == pytest.approx(metrics["loss_history"], rel=1e-3)
    peaks, highest = found["peak_memory_bytes"], max(peak["rss"] for peak in metrics["peak_memory_bytes"])
    assert peaks == sorted(peaks) and peaks[-1] <= highest * 1.001
    assert set(found["communication_bytes_per_step"][1:]) == {sum(metrics["communication_bytes_per_step"].values())}
    assert all(min(values) > 0 for values in found.values()), found
