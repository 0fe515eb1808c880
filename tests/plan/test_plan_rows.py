"""Time, price and MFU of a plan for the rows as they are, beside sequences as long as they may be."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from tests.helpers.plan_jobs import ROOT, job, recipe
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.data import prepare as data_prepare
from zero_recipes.data.audit import holding
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import RowLengths, prepare_rows, rows_at_hand
from zero_recipes.plan import cost
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.formulas.shape import shape_of
from zero_recipes.plan.rows import make_row
from zero_recipes.plan.sequences import padded_together, sequence_of

H100 = gpu_named("h100-80gb", gpus())
TINY = "recipes/tiny.yaml"
ALPACA = ROOT.parent / "shared" / "fixtures" / "alpaca_2k.jsonl"


@pytest.fixture(autouse=True)
def at_home(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))  # no rows of other tests' runs
    monkeypatch.setenv("COLUMNS", "200")


def drawn(seed: int, count: int = 200, longest: int = 512) -> RowLengths:
    """Rows of very uneven length, as instructions have."""
    draw = random.Random(seed)
    lengths = tuple(min(longest, int(draw.lognormvariate(4.6, 0.7)) + 1) for _ in range(count))
    return RowLengths(lengths, count, count, "drawn")


def packed(rows: RowLengths, longest: int = 512, full: float = 1.0) -> RowLengths:
    return replace(rows, sequences=sum(rows.lengths) / longest / full)


def estimated(asked, rows=None, factor=None) -> cost.Speed:
    return cost.estimate(asked, predict_by_formulas(asked), H100, factor, rows)


# one sequence


def test_rows_as_long_as_they_may_be_are_full_rows():
    for asked in (job("zero3"), job("zero3", packing=True), job("ddp", padding_free=True)):
        assert estimated(asked, RowLengths((512,) * 7, 7, 7, "")) == estimated(asked)


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_what_batches_drawn_at_random_have(seed):
    rows, draw = drawn(seed), random.Random(seed)
    asked = job("ddp", 2, per_device_train_batch_size=draw.randint(2, 8), gradient_accumulation_steps=4)
    batch = asked.settings.per_device_train_batch_size
    longest = [max(draw.choices(rows.lengths, k=batch)) for _ in range(40_000)]
    model = shape_of(asked.config, asked.settings).flops
    found = sequence_of(asked, 512, rows)
    assert found.places == pytest.approx(statistics.mean(longest), rel=0.01)
    padded = statistics.mean(model.of_rows([length]) for length in longest)
    assert found.computed == pytest.approx(padded / model.of_rows([512]), rel=0.01)
    assert found.tokens == rows.mean
    assert found.flops == pytest.approx(sum(length * model.per_token(length) for length in rows.lengths) / 200)


def test_who_waits_for_the_longest_row_of_all_ranks():
    assert padded_together(job("ddp", 8)) == padded_together(job("zero1", 8)) == 4  # two passes: they meet after both
    assert padded_together(job("ddp", 8, gradient_accumulation_steps=1)) == 4 * 8
    assert padded_together(job("zero2", 8)) == padded_together(job("zero3", 8)) == 4 * 8
    alone = job("ddp", 1, per_device_train_batch_size=1)
    assert sequence_of(alone, 512, drawn(1)).places == pytest.approx(drawn(1).mean)


@pytest.mark.parametrize("key", [{"padding_free": True}, {"train_sampling_strategy": "group_by_length"}])
def test_where_nothing_is_padded_the_rows_alone_are_computed(key):
    rows, asked = drawn(2), job("zero3", **key)
    found = sequence_of(asked, 512, rows)
    assert found.places == found.tokens == rows.mean
    assert found.computed == found.flops / shape_of(asked.config, asked.settings).flops.of_rows([512])


# time, price and MFU


def test_packed_rows_cost_what_full_ones_do_and_padded_ones_more_for_each_token():
    rows, plain, asked = drawn(3), job("zero3"), job("zero3", packing=True)
    full = estimated(plain)
    pack, padded = estimated(asked, packed(rows, full=0.97)), estimated(plain, rows)
    assert pack.tokens_per_step == pytest.approx(0.97 * full.tokens_per_step, abs=1)
    assert 0.9 * full.middle < pack.middle < full.middle  # attention within rows is less than that of a whole pack
    assert padded.middle < pack.middle and padded.tokens_per_second[1] < pack.tokens_per_second[0]
    price = {name: cost.cost(plain, speed, 2.0).per_million_tokens for name, speed in
             {"full": full, "pack": pack, "padded": padded}.items()}  # fmt: skip
    assert price["pack"] == pytest.approx(price["full"], rel=0.1)
    assert price["padded"][0] > 1.5 * price["pack"][0]
    assert padded.mfu[1] < 0.7 * pack.mfu[1] and pack.mfu == pytest.approx(full.mfu, rel=0.1)


def test_the_price_of_rows_of_known_lengths_by_hand():
    """On one GPU, without Adam and links: 2 of 4 rows of 100 tokens, 2 of 300, in micro batches of 2."""
    asked = job("ddp", 1, per_device_train_batch_size=2, gradient_accumulation_steps=1)
    rows = RowLengths((100, 300, 100, 300), 4, 4, "")
    gpu = H100.model_copy(update={"achievable": (0.5, 0.5), "memory_gb_s": 1e12})
    prediction = predict_by_formulas(asked)
    found = cost.estimate(asked, prediction, gpu, rows=rows)
    model = shape_of(asked.config, asked.settings).flops
    padded = 0.25 * model.of_rows([100]) + 0.75 * model.of_rows([300])  # the longer of two
    seconds = prediction.flops_per_step * padded / model.of_rows([512]) / (989e12 * 0.5)
    assert found.step_seconds == pytest.approx((seconds, seconds), rel=1e-6)
    assert found.tokens_per_step == 2 * 200
    per_million = cost.cost(asked, found, price=3.6).per_million_tokens[0]
    assert per_million == pytest.approx(seconds * 3.6 / 3600 / 400 * 1e6, rel=1e-6)
    useful = 2 * (model.of_rows([100]) + model.of_rows([300])) / 2
    assert found.mfu[0] == pytest.approx(useful / seconds / 989e12, rel=1e-6)


def test_mfu_counts_no_recomputation():
    again = estimated(job("zero3", activation_checkpointing=True))
    plain = estimated(job("zero3", activation_checkpointing=False))
    assert again.middle > 1.2 * plain.middle and again.mfu[1] < plain.mfu[1] / 1.2


def test_tf32_has_its_own_peak():
    plain, fast = (job("zero3", bf16=False, tf32=tf32) for tf32 in (None, True))
    slow, quick = estimated(plain), estimated(fast)
    assert slow.computing[0] / quick.computing[0] == pytest.approx(494 / 67, rel=0.05)  # Adam takes the same


def test_shared_sequences_are_counted_once():
    asked = job("zero3", 8, sequence_parallel_size=4)
    assert estimated(asked).tokens_per_step == 4 * 2 * 512 * 8 // 4
    assert estimated(asked).mfu[1] < 0.6


def test_a_measured_run_calibrates_to_its_own_mfu():
    """A run of padded rows: what it reached is what the plan says it reaches, whatever share of its places is empty."""
    asked, rows = job("zero3"), drawn(5)
    prediction, seconds, steps = predict_by_formulas(asked), 0.8, 40
    each = sequence_of(asked, 512, RowLengths((150.0,), 1, None, ""))  # places of a measured sequence
    sequences = 4 * 2 * 2
    measured = {"model": asked.model, "strategy": "zero3", "world_size": 2, "micro_batch_size": 4,
                "gradient_accumulation_steps": 2, "max_length": 512, "tokens": {"all": sequences * 150 * steps},
                "loss_history": [1.0] * steps, "tokens_per_second": {"all": sequences * 150 / seconds}}  # fmt: skip
    factor = cost._calibration(measured, asked, prediction, H100)
    again = cost.estimate(asked, prediction, H100, factor, RowLengths((150.0,), 1, None, ""))
    assert again.middle == pytest.approx(seconds)
    mfu = sequences / 2 * each.flops / seconds / 989e12  # of one rank, as metrics.json has it
    assert again.mfu[0] < mfu < again.mfu[1] and again.mfu[0] == pytest.approx(mfu / 1.1)
    longer = cost.estimate(asked, prediction, H100, factor, rows)
    assert longer.middle > seconds, "rows that are longer, or padded more, take longer"
    del measured["tokens"]
    assert cost._calibration(measured, asked, prediction, H100) > factor, "else taken as long as they may be"


# where the lengths are from


def test_the_rows_of_a_folder_are_tokenised_as_the_run_does_it():
    own = recipe("tiny")
    found = rows_at_hand(own.settings, own.path)
    from transformers import AutoTokenizer

    from zero_recipes.data.load import alpaca_row

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    rows = [alpaca_row(json.loads(line)) for line in (ROOT / "tiny_world" / "train.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    whole = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    assert found.epoch == len(rows) and len(found.lengths) == found.sequences == len(rows[::2])
    assert sorted(found.lengths) == sorted(whole[::2]) and found.mean == pytest.approx(statistics.mean(whole), rel=0.01)
    cut = rows_at_hand(own.settings.replace(max_length=40), own.path)
    assert max(cut.lengths) == 40


@pytest.mark.parametrize("keys", [{}, {"packing": True}, {"eval_strategy": "no"}])
def test_rows_that_a_run_has_prepared_are_read_all_of_them(keys, monkeypatch):
    """The run with the hub at hand, which tokenizers note; a plan never asks it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    own = recipe("tiny")
    settings = own.settings.replace(**keys)
    few = rows_at_hand(settings, own.path)
    assert few.source.startswith("1,080 of 2,160 rows")
    script_args, args, model_args, dataset_args, ours = recipes.instances(settings.replace(use_cpu=True), own.path)
    rows = prepare_rows(script_args, args, dataset_args, ours, load_tokenizer(model_args, args))
    found = rows_at_hand(settings, own.path)
    assert found.source == "all 2,160 rows, as a run has prepared them"
    assert found.epoch == found.sequences == len(rows.train) and sum(found.lengths) == rows.audit.tokens
    assert len(found.lengths) == 2160 and found.mean == pytest.approx(few.mean, rel=0.02)
    assert rows_at_hand(settings.replace(max_length=200), own.path).source == few.source  # other rows


def test_packed_rows_are_packed_by_trls_own_code(monkeypatch):
    own = recipe("tiny")
    settings = own.settings.replace(packing=True)
    found, plain = rows_at_hand(settings, own.path), rows_at_hand(own.settings, own.path)
    assert sorted(found.lengths) == sorted(plain.lengths) and 0.8 < sum(found.lengths) / found.sequences / 256 <= 1
    assert found.epoch == 2 * found.sequences
    wrapped = rows_at_hand(settings.replace(packing_strategy="wrapped"), own.path)
    assert len([length for length in wrapped.lengths if length < 256]) <= 2  # the last of each thousand rows
    assert sum(wrapped.lengths) == sum(plain.lengths)
    monkeypatch.setattr(data_prepare, "PLANNED_ROWS", 100)
    few = rows_at_hand(own.settings, own.path)
    assert 50 < len(few.lengths) <= 100 and few.epoch == plain.epoch
    assert few.mean == pytest.approx(plain.mean, rel=0.1)


@pytest.mark.skipif(not ALPACA.exists(), reason="the shared fixtures are not here")
def test_rows_of_alpaca_are_padded_and_far_from_full():
    """Rows of 512 tokens at micro batches of 4, as recipes/pythia.yaml has them."""
    own = recipe("tiny", "--max_length", "512")
    settings = own.settings.replace(
        dataset_name=None, datasets=[{"path": "json", "data_files": str(ALPACA), "split": "train"}]
    )
    found = rows_at_hand(settings, own.path)
    assert not isinstance(found, str), found
    assert found.epoch == len(ALPACA.read_text().splitlines())
    asked = job("ddp", 1)
    full, real = estimated(asked), estimated(asked, found)
    assert 1.2 * found.mean < sequence_of(asked, 512, found).places < 0.8 * 512
    assert real.middle < 0.9 * full.middle and real.tokens_per_second[1] < full.tokens_per_second[1] / 1.2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dataset_streaming": True}, "a stream"),
        ({"dataset_name": "no-such/data-set"}, "no-such/data-set"),
        ({"model_name_or_path": "no-such/model"}, "nor in the cache"),
        ({"dataset_name": "./nowhere"}, "./nowhere"),
    ],
)
def test_where_rows_are_not_at_hand_it_is_said_why(changes, says):
    own = recipe("tiny")
    found = rows_at_hand(own.settings.replace(**changes), own.path)
    assert isinstance(found, str) and says in found


def plan(capsys, *options: str) -> str:
    assert cli.main(["plan", TINY, "--gpus", "2", "--gpu", "h100-80gb", "--quick", *options]) == 0
    return capsys.readouterr().out


def test_the_plan_prints_the_rows_beside_full_ones(capsys):
    options = ("--strategies", "zero2", "--price", "2")
    said, document = plan(capsys, *options), json.loads(plan(capsys, "--json", *options))
    assert "1,080 of 2,160 rows tokenised: 49 tokens on average" in said and "to the longest of 16" in said
    assert all(header in said for header in ("Step of", "Real", "1M real", "MFU"))
    (row,) = document["rows"]
    real, mean = row["real_rows"], document["row_lengths"]["mean_tokens"]
    assert real["tokens_per_step"] == round(16 * mean) and row["tokens_per_step"] == 16 * 256
    for shown in (row, real):
        per_step = [2 * 2 / 3600 * end for end in shown["step_seconds"]]
        assert shown["cost"]["per_step"] == pytest.approx(per_step)
        each = [end * 1e6 / shown["tokens_per_step"] for end in per_step]
        assert shown["cost"]["per_million_tokens"] == pytest.approx(each)
        assert shown["cost"]["hours"] == pytest.approx([120 * end / 3600 for end in shown["step_seconds"]])
    assert real["step_seconds"][1] < row["step_seconds"][1]


def test_a_max_length_that_no_row_comes_near_is_said_with_one_that_holds_them(capsys):
    own = recipe("tiny")
    longest = max(rows_at_hand(own.settings, own.path).lengths)
    said = " ".join(plan(capsys, "--strategies", "zero2").split())
    assert f"None of them has more than {longest} tokens: --max_length {holding(longest)} trains them all" in said
    assert longest <= holding(longest) < longest + 64 and holding(longest) % 64 == 0
    for options in (("--max_length", str(holding(longest))), ("--packing", "true"), ("--mean_tokens", "50")):
        assert "None of them has more" not in plan(capsys, "--strategies", "zero2", *options)


def test_an_epoch_of_packed_rows_is_an_epoch_of_packs(capsys):
    options = ("--strategies", "zero2", "--price", "2", "--max_steps", "-1", "--packing", "true")
    (row,) = json.loads(plan(capsys, "--json", *options))["rows"]
    own = recipe("tiny")
    packs = rows_at_hand(own.settings.replace(packing=True), own.path).epoch
    steps = math.ceil(math.ceil(packs / 8) / 2) * own.settings.num_train_epochs
    assert row["real_rows"]["cost"]["hours"] == pytest.approx(
        [steps * end / 3600 for end in row["real_rows"]["step_seconds"]]
    )


def test_a_stated_mean_takes_the_place_of_the_rows(capsys):
    said = plan(capsys, "--mean_tokens", "64")
    assert "Rows: --mean_tokens 64, all rows alike: 64 tokens on average, of 256" in said
    document = json.loads(plan(capsys, "--json", "--mean_tokens", "64"))
    assert {row["real_rows"]["tokens_per_step"] for row in document["rows"]} == {16 * 64}
    full = json.loads(plan(capsys, "--json", "--mean_tokens", "64", "--packing", "true"))
    assert {row["real_rows"]["tokens_per_step"] for row in full["rows"]} == {16 * 256}
    assert cli.main(["plan", TINY, "--gpus", "2", "--gpu", "h200", "--mean_tokens", "300"]) == 2
    assert "ZR841" in capsys.readouterr().err


def test_without_rows_the_plan_says_so_and_counts_full_ones(capsys):
    said = plan(capsys, "--dataset_name", "no-such/data-set", "--strategies", "zero2")
    assert "Rows: their lengths are not at hand" in said and "each is taken to have 256 tokens" in said
    (row,) = json.loads(plan(capsys, "--json", "--dataset_name", "no-such/data-set", "--strategies", "zero2"))["rows"]
    assert row["real_rows"] is None and len(row["mfu"]) == 2


def test_what_is_recommended_is_as_fast_as_the_rows_make_it():
    asked = job("zero3")
    row = make_row(asked, H100, predict_by_formulas, {}, with_change=False, lengths=drawn(7))
    assert row.expected is row.real and row.real.middle < row.speed.middle
    assert make_row(asked, H100, predict_by_formulas, {}, with_change=False).expected.tokens_per_step == 8192
