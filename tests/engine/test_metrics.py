"""metrics.json: exactly the contract's keys, and numbers that an independent count agrees with."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, arguments, write_recipe
from zero_recipes.core.process import PHASES
from zero_recipes.core.zero_paper import paper_volume
from zero_recipes.data.forms import alpaca_row
from zero_recipes.metrics.schema import Metrics

EPOCHS = ("ddp", "zero0", "zero1", "zero2")  # each a run of one epoch on two processes


def test_the_keys_are_the_contracts(trained):
    contract = {field.alias or name for name, field in Metrics.model_fields.items()} - {"failure"}
    for metrics in (trained(strategy).metrics for strategy in EPOCHS):
        assert set(metrics) == contract
        assert metrics["predicted"] is None and metrics["memory_phases"] is None
        assert metrics["skipped_steps"] is None
        assert [set(rank) for rank in metrics["peak_memory_bytes"]] == [{"allocated", "reserved", "rss"}] * 2
        assert metrics["peak_memory_bytes"][0]["allocated"] is None and metrics["peak_memory_bytes"][0]["rss"] > 2**27
        assert list(metrics["phase_seconds"]) == list(PHASES)
        assert metrics["phase_seconds"]["train"] > sum(metrics["step_seconds"][key] for key in ("median", "p90"))


def test_tokens_equal_an_independent_count(trained):
    """And the audit, before training, has counted the same."""
    run = trained("ddp")
    lines = (run.recipe.parent / "few" / "train.jsonl").read_text().splitlines()
    rows, tokenizer = list(map(json.loads, lines)), AutoTokenizer.from_pretrained(run.recipe.parent / "model")
    prompts = [len(tokenizer(alpaca_row(row)["prompt"])["input_ids"]) for row in rows]
    answers = [len(tokenizer(row["output"] + tokenizer.eos_token)["input_ids"]) for row in rows]
    lengths = [min(96, prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    supervised = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    assert any(length == 96 for length in lengths), "no row was cut"
    audited = f"{len(rows)} rows, {sum(lengths):,} tokens, {sum(supervised):,} supervised"
    assert audited in (run.folder / "recipe.resolved.yaml").read_text()
    for metrics in (trained(strategy).metrics for strategy in EPOCHS):
        assert metrics["tokens"]["non_padding"] == sum(lengths)
        assert metrics["tokens"]["supervised"] == sum(supervised)
        assert sum(lengths) < metrics["tokens"]["all"] <= len(rows) * 96
        assert metrics["step_seconds"]["warmup_steps_excluded"] == 3 and len(metrics["loss_history"]) == 6


def test_a_tracker_has_speed_memory_and_communication_of_each_step(two, tmp_path):
    """TensorBoard, as read back from its own file; transformers hands the same to every tracker."""
    written = tmp_path / "written"
    recipe = write_recipe(tmp_path, report_to="tensorboard", env={"TENSORBOARD_LOGGING_DIR": str(written)})
    metrics = two.run(cases.train, argv=arguments(recipe, "zero2", tmp_path / "out"))[0]["metrics"]
    events = EventAccumulator(str(written)).Reload()
    names = ("loss", "tokens_per_second", "peak_memory_bytes", "communication_bytes_per_step")
    found = {name: [event.value for event in events.Scalars(f"train/{name}")] for name in names}
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
        grid(1, 2, {}, 2 + 1),
        (1, 1, OWNERS, 1 + 1),
        (2, 2, {}, 2 * 2 + 1),
        grid(2, 2, OWNERS, 2 * 1 + 1),
        (3, 2, NEVER_KEPT, 2 * (2 + 1)),  # after the first step, in which it learns
        grid(3, 2, {"stage3_param_persistence_threshold": 0}, 2 * (1 + 1)),
    ],
)
def test_each_step_sends_what_the_source_says(two, tmp_path, stage, accumulation, zero, wanted):
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= zero
    # of four steps two are counted, and the first of them is left out; what the checkpoint between them sends is, too
    saves = {"save_strategy": "steps", "save_steps": 1}
    recipe = write_recipe(tmp_path, deepspeed=config, gradient_accumulation_steps=accumulation, max_steps=4, **saves)
    metrics = two.run(cases.train, argv=[str(recipe), "--output_dir", str(tmp_path / "out")])[0]["metrics"]
    phi, sent = 2 * metrics["trainable_parameters"], metrics["communication_bytes_per_step"]
    assert paper_volume(sent) / phi == pytest.approx(wanted, rel=0.02)
    if zero is OWNERS:
        assert sent["reduce"] + sent.get("all_reduce", 0) == pytest.approx(sent["all_gather"] * accumulation, rel=0.05)
