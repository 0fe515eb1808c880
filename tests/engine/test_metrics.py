"""metrics.json: exactly the contract's keys, and numbers that an independent count agrees with."""

import json
import sqlite3
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, arguments, write_recipe
from zero_recipes.core.process import PHASES
from zero_recipes.data.forms import alpaca_row
from zero_recipes.metrics.schema import Metrics
from zero_recipes.theory.zero_paper import paper_volume


@pytest.fixture(scope="module")
def epoch(trained):
    """One epoch on two processes under each of four strategies: (metrics by strategy, the rows, the tokenizer)."""
    runs = {strategy: trained(strategy) for strategy in ("ddp", "zero0", "zero1", "zero2")}
    tokenizer = AutoTokenizer.from_pretrained(runs["ddp"].recipe.parent / "model")
    return {strategy: run.metrics for strategy, run in runs.items()}, runs["ddp"].rows, tokenizer


def test_the_keys_are_the_contracts(epoch):
    contract = {field.alias or name for name, field in Metrics.model_fields.items()} - {"failure"}
    for metrics in epoch[0].values():
        assert set(metrics) == contract
        assert metrics["predicted"] is None and metrics["memory_phases"] is None
        assert metrics["skipped_steps"] is None
        assert [set(rank) for rank in metrics["peak_memory_bytes"]] == [{"allocated", "reserved", "rss"}] * 2
        assert metrics["peak_memory_bytes"][0]["allocated"] is None and metrics["peak_memory_bytes"][0]["rss"] > 2**27
        assert list(metrics["phase_seconds"]) == list(PHASES)
        assert metrics["phase_seconds"]["train"] > sum(metrics["step_seconds"][key] for key in ("median", "p90"))


def test_tokens_equal_an_independent_count(epoch, trained):
    """And the audit, before training, has counted the same."""
    found, rows, tokenizer = epoch
    prompts = [len(tokenizer(alpaca_row(row)["prompt"])["input_ids"]) for row in rows]
    answers = [len(tokenizer(row["output"] + tokenizer.eos_token)["input_ids"]) for row in rows]
    lengths = [min(96, prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    supervised = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    assert any(length == 96 for length in lengths), "no row was cut"
    audited = f"{len(rows)} rows, {sum(lengths):,} tokens, {sum(supervised):,} supervised"
    assert audited in (trained("ddp").folder / "recipe.resolved.yaml").read_text()
    for metrics in found.values():
        assert metrics["tokens"]["non_padding"] == sum(lengths)
        assert metrics["tokens"]["supervised"] == sum(supervised)
        assert sum(lengths) < metrics["tokens"]["all"] <= len(rows) * 96
        assert metrics["step_seconds"]["warmup_steps_excluded"] == 3 and len(metrics["loss_history"]) == 6


def test_communication_is_what_went_through_the_collectives(epoch):
    found, _, _ = epoch
    psi = found["ddp"]["parameters"]
    sent = {strategy: metrics["communication_bytes_per_step"] for strategy, metrics in found.items()}
    assert sent["ddp"] == {"all_reduce": 4 * psi}  # fp32 gradients under autocast
    assert sent["zero0"] == {"all_reduce": 2 * psi}
    for strategy in ("zero1", "zero2"):
        assert set(sent[strategy]) == {"all_reduce", "all_gather"}
        assert 0 <= sent[strategy]["all_reduce"] - 2 * psi < 64, "gradients, and a few flags beside them"
        assert 0 <= sent[strategy]["all_gather"] - 2 * psi < 64, "parameters, and the alignment of the flat groups"


def of_tensorboard(folder, name):
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(f"train/{name}")]


def of_mlflow(folder, name):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs(["0"])
    return [metric.value for metric in client.get_metric_history(run.info.run_id, name)]


def of_trackio(folder, name):
    (path,) = folder.glob("*.db")
    rows = [json.loads(row) for (row,) in sqlite3.connect(path).execute("select metrics from metrics order by id")]
    return [row[f"train/{name}"] for row in rows if f"train/{name}" in row]


def of_wandb(folder, name):
    """LevelDB's log after a header of 7 bytes: parts (checksum, size, kind) in blocks of 32 KiB. wandb 0.31 brings no
    reader."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, record, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 0 < -place % 32768 < 7:
            place += -place % 32768
        size, kind = struct.unpack_from("<4xHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            items, record = Record.FromString(record).history.item, b""
            found += [json.loads(item.value_json) for item in items if f"train/{name}" in (item.key, *item.nested_key)]
    return found


TRACKERS = {
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", "{}", of_tensorboard),
    "mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///{}/mlflow.db", of_mlflow),
    "trackio": ("TRACKIO_DIR", "{}", of_trackio),
    "wandb": ("WANDB_DIR", "{}", of_wandb),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_has_speed_memory_and_communication_of_each_step(two, tmp_path, tracker):
    """As read back from its own file; tensorboard is installed with the tests."""
    pytest.importorskip(tracker)
    variable, address, values_of = TRACKERS[tracker]
    folder = tmp_path / "written"
    folder.mkdir()
    environment = {"WANDB_MODE": "offline", variable: address.format(folder)}
    recipe = write_recipe(tmp_path, report_to=tracker, env=environment)
    metrics = two.run("train", argv=arguments(recipe, "zero2", tmp_path / "out"))[0]["metrics"]
    names = ("loss", "tokens_per_second", "peak_memory_bytes", "communication_bytes_per_step")
    found = {name: values_of(folder, name) for name in names}
    assert found["loss"] == pytest.approx(metrics["loss_history"], rel=1e-3)
    peaks, highest = found["peak_memory_bytes"], max(peak["rss"] for peak in metrics["peak_memory_bytes"])
    assert peaks == sorted(peaks) and peaks[-1] <= highest * 1.001
    assert set(found["communication_bytes_per_step"][1:]) == {sum(metrics["communication_bytes_per_step"].values())}
    assert all(min(values) > 0 for values in found.values()), found


# what DeepSpeed sends, by stage and micro steps


# Φ a step by DeepSpeed's source: stages 1 and 2 all-reduce gradients (2Φ, or 1Φ where each part goes to its owner
# alone; stage 2 at every micro step) and gather the parameters (1Φ); stage 3 gathers and reduces at every micro step,
# and gathers anew for backward what it does not keep
OWNERS = {"use_multi_rank_bucket_allreduce": False}


@pytest.mark.parametrize(
    ("stage", "accumulation", "zero", "wanted"),
    [
        grid(0, 2, {}, 2),
        (1, 2, {}, 2 + 1),
        (1, 1, OWNERS, 1 + 1),
        (2, 2, {}, 2 * 2 + 1),
        grid(2, 2, OWNERS, 2 * 1 + 1),
        (3, 2, NEVER_KEPT, 2 * (2 + 1)),  # after the first step, in which it learns
        (3, 2, {"stage3_param_persistence_threshold": 0}, 2 * (1 + 1)),
    ],
)
def test_each_step_sends_what_the_source_says(two, tmp_path, stage, accumulation, zero, wanted):
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= zero
    recipe = write_recipe(tmp_path, deepspeed=config, gradient_accumulation_steps=accumulation, max_steps=6)
    metrics = two.run("train", argv=[str(recipe), "--output_dir", str(tmp_path / "out")])[0]["metrics"]
    phi, sent = 2 * metrics["trainable_parameters"], metrics["communication_bytes_per_step"]
    assert paper_volume(sent) / phi == pytest.approx(wanted, rel=0.02)
    if zero is OWNERS:
        assert sent["reduce"] + sent.get("all_reduce", 0) == pytest.approx(sent["all_gather"] * accumulation, rel=0.05)
