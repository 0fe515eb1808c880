"""Time, price and MFU of a plan: by hand, for rows as they are, and from a measured run."""

import json
from dataclasses import replace

import pytest

from tests.helpers.plan_jobs import GB, H100, ROOT, job, made_up, recipe
from zero_recipes.config.row_lengths import RowLengths
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.gpus import gpus
from zero_recipes.data.load import load_tokenizer
from zero_recipes.data.prepare import prepare_rows, rows_at_hand
from zero_recipes.tools import main as cli
from zero_recipes.tools.plan import cost
from zero_recipes.tools.plan.cost import padded_together, sequence_of
from zero_recipes.tools.plan.formulas import Sizes, predict_by_formulas
from zero_recipes.tools.plan.shape import shape_of

TINY = "recipes/tiny.yaml"


@pytest.fixture(autouse=True)
def at_home(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))  # no rows of other tests' runs
    monkeypatch.setenv("COLUMNS", "200")


def estimated(asked, rows=None) -> cost.Speed:
    return cost.estimate(asked, predict_by_formulas(asked), H100, rows)


def test_computation_is_flops_at_the_share_of_the_rate_and_what_layers_read_and_write():
    fast, asked = H100.model_copy(update={"memory_gb_s": 1e9}), job("zero0", ranks=1)
    found = cost.estimate(asked, made_up(asked, GB), fast)
    attention = 8 * 32 * 3.5 * 2 * 512**2 * 4096  # of 8 rows and 32 layers, their causal halves: 2·s²·h
    rate = 989e12 * 0.803 * cost.constant("achievable")  # of an H100's sweep
    products = (1e15 - attention) / rate + attention / (989e12 * 0.33)
    assert found.computing == pytest.approx(products)
    assert found.communicating == 0 and found.tokens_per_step == 4 * 2 * 512  # one rank
    sizes = Sizes(asked, shape_of(asked.config, asked.settings))
    moved = 2 * 3 * cost.constant("activation_traffic") * 32 * sizes.layer(4 * 512)  # two passes, backward twice
    found = cost.estimate(asked, made_up(asked, GB), H100)
    assert found.computing == pytest.approx(products + moved / (3350e9 * cost.constant("memory_share")))
    low, high = cost.constants()["spread"]["long passes"]
    assert cost.without_rows(asked, H100)  # nobody published times of stage 0 on an H100
    assert found.step_seconds == pytest.approx([found.computing * low / 1.25, found.computing * high * 1.25])


def test_products_are_as_fast_as_a_sweep_over_the_card_has_it():
    """By its share of the peak, an MI300X is slower than an H100, whose peak is lower."""
    asked = job("ddp", attn_implementation="eager")  # no kernel of attention
    prediction = predict_by_formulas(asked)

    def computing(name: str) -> float:
        return cost.estimate(asked, prediction, gpus()[name].model_copy(update={"memory_gb_s": 1e9})).computing

    assert computing("mi300x-192gb") > computing("h100-80gb") > computing("b200-192gb")
    assert computing("v100-16gb") / computing("a100-80gb") == pytest.approx(312 * 0.869 / (125 * 0.85))  # assumed


def test_no_seam_between_short_passes_and_long_ones():
    def middle(length: int) -> float:
        asked = job("ddp", 1, per_device_train_batch_size=1, max_length=length)
        found = cost.estimate(asked, predict_by_formulas(asked), H100)
        assert found.step_seconds[0] < found.likely[0] < found.middle < found.likely[1] < found.step_seconds[1]
        return found.middle

    for length in (1024, 2048):
        assert middle(length - 1) <= middle(length) <= 1.01 * middle(length - 1)


def test_adapters_unpacking_and_shards_cost_the_hosts_time():
    """Of 32 layers with one adapter each; four linear layers are packed."""

    def hosting(strategy: str = "ddp", **values) -> float:
        return cost._hosting(job(strategy, gradient_accumulation_steps=1, activation_checkpointing=False, **values))

    rounds = 2  # forward and backward
    plain, lora = hosting(), hosting(use_peft=True)
    assert lora - plain == pytest.approx(rounds * 32 * cost.constant("adapter_seconds"))
    packed = hosting(use_peft=True, load_in_4bit=True) - lora
    assert packed == pytest.approx(rounds * 32 * 4 * cost.constant("unpack_seconds"))
    assert hosting("fsdp2") - plain == pytest.approx(rounds * 32 * cost.constant("shard_seconds"))


def test_communication_is_what_the_computation_does_not_hide():
    """Reductions of stage 2 and its gather hide behind nothing (DeepSpeed#8364); a link's time, and each call's."""
    asked, wide = job("zero2", ranks=2), job("zero2", ranks=16)
    moved = (2 * 2e9 + 2e9) / 2  # an all-reduce goes around twice; half of each on two ranks
    calls = 2 * 2e9 / (2 * 2e8) * 30e-6  # ds_configs/zero2.json's buckets
    found = cost.estimate(asked, made_up(asked, GB), H100).communicating
    assert found == pytest.approx(moved / (450e9 * 0.7) + calls)
    machines = cost.estimate(wide, made_up(wide, GB), H100).communicating - calls
    assert machines == pytest.approx(moved * 15 / 8 / (400e9 * 0.7))  # rings go through all 8 cards of a machine
    alone = job("zero2", ranks=2, gpus_per_node=1)
    network = cost.estimate(alone, made_up(alone, GB), H100).communicating - calls
    assert network == pytest.approx(moved / (50e9 * 0.7))
    ahead = job("zero3", ranks=2)
    made = made_up(ahead, GB).model_copy(update={"communication_bytes_per_step": {"all_gather": 2 * GB}})
    gathers = 2e9 / 2 / (450e9 * 0.7) + 2e9 / (2 * 2e8) * 30e-6
    assert cost.estimate(ahead, made, H100).communicating == pytest.approx(gathers)
    alone = job("ddp", ranks=2)
    last = 25 * 2**20 / (450e9 * 0.7) + 30e-6  # DDP's last bucket has no computation beside it
    made = made_up(alone, GB).model_copy(update={"communication_bytes_per_step": {"all_reduce": 2 * GB}})
    assert cost.estimate(alone, made, H100).communicating == pytest.approx(last)
    for gpu in (H100, gpus()["a100-80gb"]):  # on one machine stage 3 is not faster than DDP
        seconds = {
            name: cost.estimate(asked, predict_by_formulas(asked), gpu).middle
            for name in ("ddp", "zero3")
            for asked in [job(name, 8, max_length=2048, per_device_train_batch_size=1, gradient_accumulation_steps=1)]
        }
        assert seconds["zero3"] >= seconds["ddp"]
    plain, copied = job("zero3", 4, gpus_per_node=2), job("zero3_hpz", 4, gpus_per_node=2)
    assert estimated(copied).communicating < estimated(plain).communicating  # hpZ spares the network


def test_attention_takes_as_long_as_its_kernel_on_that_card():
    """At 64k tokens it is most of the work. Eager attention is matrix products like others."""
    a100, b200 = gpus()["a100-80gb"], gpus()["b200-192gb"]

    def computing(kernel: str | None, gpu, length: int = 65_536) -> float:
        asked = job("fsdp2", max_length=length, per_device_train_batch_size=1, attn_implementation=kernel)
        return cost.estimate(asked, predict_by_formulas(asked), gpu).computing

    two, three = (computing(f"flash_attention_{version}", H100) for version in (2, 3))
    assert computing("sdpa", H100) == computing(None, H100) == two > 1.4 * three
    assert computing("flash_attention_2", b200) > 2.5 * computing("flash_attention_4", b200)
    assert two < computing("flash_attention_2", a100) < 3.2 * two  # a third of the peak, and nearly all of it used
    short = [computing(kernel, H100, 512) for kernel in ("flash_attention_2", "flash_attention_3")]
    assert short[0] < 1.02 * short[1]
    asked = job("zero3", attn_implementation="eager")
    assert Sizes(asked, shape_of(asked.config, asked.settings)).kernel_flops() == 0


def test_many_small_collectives_and_short_steps_cost_the_hosts_time():
    def with_bucket(size):
        asked = job("zero2", per_device_train_batch_size=1)
        zero = asked.ds_config["zero_optimization"] | {"reduce_bucket_size": size}
        return estimated(replace(asked, ds_config=asked.ds_config | {"zero_optimization": zero}))

    assert with_bucket(50_000).middle > 2 * with_bucket(500_000_000).middle
    short, long = (estimated(job("zero3", max_length=length)) for length in (64, 2048))
    assert short.waiting > short.computing and long.waiting == 0
    kinds = [("zero3", 2, {}), ("zero3", 2, {"max_length": 64}), ("zero3", 16, {}), ("zero2_offload", 2, {})]
    words = ("long passes", "short passes", "several machines", "offload")
    assert all(word in cost.how_good(job(name, n, **v), H100) for (name, n, v), word in zip(kinds, words, strict=True))
    a100, b200 = gpus()["a100-80gb"], gpus()["b200-192gb"]
    assert cost.how_good(job("zero3", 2), a100).endswith(" in the whole.")
    assert "; none is for zero3 on h100-80gb: 1.25 times wider" in cost.how_good(job("zero3", 2), H100)
    assert "none is for" not in cost.how_good(job("zero2", 8), b200)
    # rows of one card and rows of one strategy are no rows of both
    far = cost.how_good(job("fsdp2", 8, max_length=65_536), b200)
    assert "for fsdp2 on b200-192gb, fsdp2 on b200-192gb over rows of 16k tokens:" in far
    long = cost.how_good(job("fsdp2", 8, max_length=65_536), a100)
    assert "none is for fsdp2 on a100-80gb over rows of 16k tokens:" in long
    assert "for ZeRO++, zero3 on b300-288gb:" in cost.how_good(job("zero3_hpz", 16), gpus()["b300-288gb"])
    one, two = (estimated(job(name, max_length=64)) for name in ("ddp", "zero3"))
    assert 1.5 * one.middle < two.middle  # stage 3's hooks


def test_weights_of_16_bits_alone_compute_in_16_bits():
    pure = {"dtype": "bfloat16", "bf16": False}
    for strategy in ("ddp", "zero2"):
        mixed, alone = predict_by_formulas(job(strategy)), predict_by_formulas(job(strategy, **pure))
        assert alone.precision == "bf16" and job(strategy, dtype="float32", bf16=False).precision == "fp32"
        assert alone.model_state_bytes.params == 2 * alone.parameters
        assert estimated(job(strategy, **pure)).computing <= estimated(job(strategy)).computing
    assert alone.model_state_bytes == mixed.model_state_bytes  # DeepSpeed keeps masters in fp32 all the same


@pytest.mark.parametrize("strategy, share", [("ddp", 1 / 3), ("fsdp2", 1), ("zero0", 0), ("zero2", 0), ("zero3", 0)])
def test_what_collectives_go_on_behind(strategy, share):
    assert cost.window(job(strategy, gradient_accumulation_steps=2)) == pytest.approx(share)


def test_offload_pays_for_the_link_and_for_adam_on_the_cpu():
    asked = job("zero2_offload", ranks=2)
    crossing = 2 * GB / 2 * (2 + 1)  # gradients of two passes, weights once, half of a billion parameters each
    found = cost.estimate(asked, made_up(asked, GB), H100)
    adam = 2 * GB / cost.constant("cpu_adam")  # two halves on one machine, in each of two passes
    assert found.offloading == pytest.approx(crossing / (64e9 * 0.65) + adam)
    ends = zip(*(cost.constants()["spread"][kind] for kind in ("long passes", "offload")), strict=True)
    beside = found.computing + found.communicating + found.waiting
    low, high = (end * beside + wide * found.offloading for end, wide in ends)
    assert found.step_seconds == pytest.approx([low / 1.25, high * 1.25])  # no row is for stage 2 on an H100
    assert cost.estimate(job("zero2"), made_up(job("zero2"), GB), H100).offloading == 0


def rows_of(lengths, sequences: float | None = None) -> RowLengths:
    return RowLengths(tuple(lengths), sequences or len(lengths), len(lengths), "drawn")


def test_who_waits_for_the_longest_row_of_all_ranks_and_where_nothing_is_padded():
    assert padded_together(job("ddp", 8)) == padded_together(job("zero1", 8)) == 4  # two passes: they meet after both
    assert padded_together(job("ddp", 8, gradient_accumulation_steps=1)) == 4 * 8
    assert padded_together(job("zero2", 8)) == padded_together(job("zero3", 8)) == 4 * 8
    for key in ({"packing": True}, {"padding_free": True}, {"train_sampling_strategy": "group_by_length"}):
        tokens, flops, computed = sequence_of(job("zero3", **key), 512, rows_of([100, 300]))
        assert tokens == 200 and computed == flops / sequence_of(job("zero3"), 512, None)[1]
    for asked in (job("zero3"), job("zero3", packing=True), job("ddp", padding_free=True)):
        assert estimated(asked, rows_of([512] * 7)) == estimated(asked)


def test_the_price_of_rows_of_known_lengths_by_hand(monkeypatch):
    """On one GPU, without Adam and links: 2 of 4 rows of 100 tokens, 2 of 300, in micro batches of 2."""
    asked = job("ddp", 1, per_device_train_batch_size=2, gradient_accumulation_steps=1)
    gpu = H100.model_copy(update={"memory_gb_s": 1e12})
    alike = {"value": {"flash_attention_2": {"others": 0.5}}}
    known = cost.constants() | {
        "achievable": {"value": 1.0},
        "products": {"value": {"others": 0.5}},
        "attention": alike,
        "spread": dict.fromkeys(("long passes", "short passes", "offload"), (1, 1)),
        "kinds": dict.fromkeys(cost.constants()["kinds"], cost.kinds_of(asked, gpu.name)),
    }
    monkeypatch.setattr(cost, "constants", lambda: known)
    monkeypatch.setattr(cost, "_hosting", lambda job: 0)
    prediction = predict_by_formulas(asked)
    found = cost.estimate(asked, prediction, gpu, rows=rows_of((100, 300, 100, 300)))
    model = shape_of(asked.config, asked.settings).flops
    padded = 0.25 * model.of_rows([100]) + 0.75 * model.of_rows([300])  # the longer of two
    seconds = prediction.flops_per_step * padded / model.of_rows([512]) / (989e12 * 0.5)
    assert found.step_seconds == pytest.approx((seconds, seconds), rel=1e-6)
    assert found.tokens_per_step == 2 * 200
    per_million = cost.cost(asked, found, price=3.6).per_million_tokens[0]
    assert per_million == pytest.approx(seconds * 3.6 / 3600 / 400 * 1e6, rel=1e-6)
    useful = 2 * (model.of_rows([100]) + model.of_rows([300])) / 2
    assert found.mfu[0] == pytest.approx(useful / seconds / 989e12, rel=1e-6)
    unknown = cost.cost(job("zero3", max_steps=-1), found, price=3.6)
    assert unknown.run is None and unknown.hours is None


def test_rows_are_tokenised_as_a_run_does_it_or_read_as_a_run_has_prepared_them(monkeypatch):
    """The run with the hub at hand, which tokenizers note; a plan never asks it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    own = recipe("tiny")
    settings = own.settings.replace(packing=True)
    few = rows_at_hand(settings, own.path)
    assert few.source.startswith("1,080 of 2,160 rows")
    longest, with_loss = rows_at_hand(own.settings, own.path).evaluated
    assert 20 < longest < 100 and 50 < with_loss < 50 * 20  # of 50 rows, whose answers are short
    assert few.evaluated[0] == 256  # packed
    settings = settings.replace(use_cpu=True)
    args = trl_arguments(settings, own.path).training
    rows = prepare_rows(settings, args, load_tokenizer(settings))
    found = rows_at_hand(settings, own.path)
    assert found.source == "all 2,160 rows, as prepared by an earlier run"
    assert found.epoch == found.sequences == len(rows.train) and sum(found.lengths) == rows.audit.tokens
    assert found.evaluated[0] == 256
    assert len(found.lengths) == 2160 and found.mean == pytest.approx(few.mean, rel=0.02)
    for changes in ({"dataset_streaming": True}, {"dataset_name": "no-such/data-set"}, {"model_name_or_path": "no"}):
        assert isinstance(rows_at_hand(settings.replace(**changes), own.path), str)  # why they are not known


def plan(capsys, *options: str) -> str:
    assert cli.main(["plan", TINY, "--gpus", "2", "--gpu", "h100-80gb", "--quick", *options]) == 0
    return capsys.readouterr().out


def test_the_plan_is_for_the_rows_that_are_at_hand(capsys):
    document = json.loads(plan(capsys, "--json", "--strategies", "zero2"))
    (row,) = document["rows"]
    assert row["speed"]["tokens_per_step"] == round(16 * document["mean_tokens"]) < 16 * 256


def test_a_stated_mean_takes_the_place_of_the_rows(capsys):
    for options, places in ((("--mean_tokens", "64"), 64), (("--mean_tokens", "64", "--packing", "true"), 256)):
        found = json.loads(plan(capsys, "--json", *options))
        assert {row["speed"]["tokens_per_step"] for row in found["rows"]} == {16 * places}
    assert cli.main(["plan", TINY, "--gpus", "2", "--gpu", "h200", "--quick", "--mean_tokens", "300"]) == 2
    assert "ZR841" in capsys.readouterr().err
    said = " ".join(plan(capsys, "--dataset_name", "no-such/data-set", "--strategies", "zero2", "-v").split())
    assert "Rows: lengths unknown" in said and "each row is assumed to have 256 tokens" in said
