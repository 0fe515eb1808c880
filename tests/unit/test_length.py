"""The end of a job, seen before it begins: steps, the peak of the learning rate, and positions for the longest row."""

import json
from pathlib import Path

import pytest
from transformers import (
    AutoTokenizer,
    CTRLConfig,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    XGLMConfig,
)

from tests.helpers.faults import ROOT, Side, findings_of
from tests.helpers.tiny import settings_with
from zero_recipes.checks.schedule import CODES, length_described, schedule_findings, schedule_of
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.model.positions import position_limit
from zero_recipes.tools import main as cli

ALONE = Strategy("ddp", 2)


def by_deepspeed(kind: str, **parameters) -> Strategy:
    block = {"type": kind, "params": parameters}
    return Strategy("zero2", 2, DsConfig({"zero_optimization": {"stage": 2}, "scheduler": block}), "ds.json")


def linear(warmup) -> Strategy:
    return by_deepspeed("WarmupLR", warmup_max_lr="auto", warmup_num_steps=warmup, warmup_type="linear")


def codes(strategy: Strategy, steps: int, **keys) -> list[str]:
    return [found.code for found in schedule_findings(settings_with(**keys), strategy, steps)]


@pytest.mark.parametrize(
    "steps, keys, found",
    [
        (100, {"warmup_steps": 200}, ["ZR174"]),
        (1, {"warmup_steps": 50}, ["ZR174"]),  # an epoch in one pack
        (100, {"warmup_steps": 91}, ["ZR174"]),  # nine steps are left
        (100, {"warmup_steps": 90}, []),
        (100, {"warmup_steps": 0.95}, ["ZR174"]),
        (100, {"warmup_steps": 0.03}, []),
        (3, {"warmup_steps": 2}, []),  # the last of three
        (3, {"warmup_steps": 3}, ["ZR174"]),
        (1, {}, []),
        (100, {"warmup_steps": 200, "lr_scheduler_type": "constant"}, []),  # which has no warm-up
        (100, {"warmup_steps": 200, "lr_scheduler_type": "constant_with_warmup"}, ["ZR174"]),
        (100, {"warmup_steps": 200, "lr_scheduler_type": "cosine"}, ["ZR174"]),
        (100, {"warmup_steps": 200, "lr_scheduler_type": "reduce_lr_on_plateau"}, []),  # by the loss
        (100, {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 150}}, ["ZR174"]),
        (100, {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"nonsense": 1}}, []),  # transformers says so
    ],
)
def test_a_job_that_never_trains_at_its_learning_rate(steps, keys, found):
    assert codes(ALONE, steps, **keys) == found


@pytest.mark.parametrize("idle, found", [(1, []), (2, ["ZR868"])])
def test_steps_at_a_learning_rate_of_zero(idle, found):
    values = {"num_stable_steps": 60 - idle, "num_decay_steps": 40}
    assert codes(ALONE, 100, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=values) == found
    total = by_deepspeed("WarmupDecayLR", total_num_steps=99 - idle, warmup_max_lr=1.0, warmup_num_steps=5)
    assert codes(total, 100) == found, "of DeepSpeed's"


@pytest.mark.parametrize(
    "strategy, found",
    [
        (linear(200), ["ZR217"]),
        (linear(89), []),
        (linear(90), ["ZR217"]),  # DeepSpeed begins a step later: nine are left
        (linear("auto"), []),
        (by_deepspeed("WarmupDecayLR", total_num_steps="auto", warmup_max_lr="auto", warmup_num_steps=99), ["ZR217"]),
        (by_deepspeed("WarmupDecayLR", total_num_steps="auto", warmup_max_lr="auto", warmup_num_steps=9), []),
        (by_deepspeed("WarmupCosineLR", total_num_steps="auto", warmup_num_steps=99), ["ZR217"]),
        (by_deepspeed("WarmupCosineLR", total_num_steps="auto", warmup_num_steps=9), []),
        # which is never quite at its peak: 0.9997 of it
        (by_deepspeed("WarmupCosineLR", total_num_steps="auto", warmup_num_steps=9, warmup_type="linear"), []),
        (by_deepspeed("LRRangeTest"), []),
        (by_deepspeed("NoSuchSchedule"), []),  # its parser says so
    ],
)
def test_the_schedules_of_deepspeed_are_judged_alike(strategy, found):
    assert codes(strategy, 100, warmup_steps=20) == found


def test_the_rates_that_are_judged_are_those_of_a_loop():
    """Of a WarmupDecayLR as DeepSpeed's engine moves it on: after each step."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    from zero_recipes.checks.schedule import _rate_by_deepspeed

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    numbers = {"total_num_steps": 10, "warmup_max_lr": 0.5, "warmup_num_steps": 3}
    real = WarmupDecayLR(optimizer, **numbers)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        real.step()
    rate = _rate_by_deepspeed(settings_with(learning_rate=0.5), by_deepspeed("WarmupDecayLR", **numbers), 12)
    assert [0.5 * rate(step) for step in range(12)] == pytest.approx(rates)


def test_long_runs_are_looked_at_in_strides():
    schedule = schedule_of(settings_with(warmup_steps=0.5), ALONE, 10**9)
    assert schedule.warmup == 5 * 10**8 and not schedule.is_too_late


@pytest.mark.parametrize(
    "keys, rows, sequences, line",
    [
        ({"max_steps": 64, "warmup_steps": 8}, None, None, "64 steps (8 of them warm-up)"),
        ({"max_steps": 64}, 64, 64, "64 rows, 64 steps in 8 epochs (none of them warm-up)"),
        ({"max_steps": 4}, 64, 64, "64 rows, 4 steps in 0.5 epochs (none of them warm-up)"),
        ({"max_steps": 1}, 2, 2, "2 rows, 1 step in 1 epoch (none of them warm-up)"),
        ({"num_train_epochs": 2}, None, None, "2 epochs (check --data counts the steps)"),
        (
            {"num_train_epochs": 2, "packing": True, "warmup_steps": 0.125},
            2000,
            256,
            "2,000 rows, 256 packs, 64 steps in 2 epochs (8 of them warm-up)",
        ),
        ({"max_steps": 9, "dataset_streaming": True}, None, None, "a stream of rows, 9 steps (none of them warm-up)"),
        ({"max_steps": 9, "warmup_steps": 20}, None, None, "9 steps (9 of them warm-up)"),
        ({"max_steps": 9, "lr_scheduler_type": "reduce_lr_on_plateau"}, None, None, "9 steps"),
    ],
)
def test_the_length_of_a_run_in_one_line(keys, rows, sequences, line):
    settings = settings_with(per_device_train_batch_size=2, gradient_accumulation_steps=2, **keys)
    assert length_described(settings, ALONE, rows, sequences) == f"steps         {line}"


# by check, with the run's own rows


def found_by_check(folder: Path, recipe: str = "", without: tuple = (), data: bool = True, **more) -> list[str]:
    return [found.code for found in findings_of(Side(recipe, without, **more), folder, data)]


def test_check_judges_the_schedule_by_the_rows_where_they_decide(tmp_path):
    """Eight rows in steps of eight: two epochs are two steps."""
    epochs = "num_train_epochs: 2\nwarmup_steps: "
    by_rows = {"without": ("max_steps",), "folder": tmp_path / "case"}
    assert found_by_check(recipe=f"{epochs}2", **by_rows) == ["ZR174"]
    assert found_by_check(recipe=f"{epochs}2", data=False, **by_rows) == []
    assert found_by_check(recipe=f"{epochs}1", **by_rows) == []
    assert found_by_check(tmp_path / "case", "warmup_steps: 200\nmax_steps: 100", data=False) == ["ZR174"]
    assert found_by_check(tmp_path / "case", "warmup_steps: 0.03\nmax_steps: 100", data=False) == [], "the fix"
    (ignored,) = findings_of(Side("warmup_steps: 20\nignore: [ZR174]"), tmp_path / "case")
    assert (ignored.level, ignored.ignored) == ("warning", True)


def test_an_epoch_that_is_packed_into_one_step(tmp_path, monkeypatch, capsys):
    keys = "packing: true\nnum_train_epochs: 1\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n"
    side = Side(f"{keys}warmup_steps: 50", without=("max_steps",))
    side.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml", "--num_processes", "2", "--data"]) == 2
    said = capsys.readouterr().out
    assert "[ZR174]" in said and "warmup_steps 50 of 1 step: the learning rate never reaches its peak" in said
    assert "8 rows, 2 packs, 1 step in 1 epoch (1 of them warm-up)" in said


def test_check_says_how_long_a_run_is(tmp_path, monkeypatch, capsys):
    Side("warmup_steps: 2").write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml", "--num_processes", "2"]) == 0
    assert "\nsteps         10 steps (2 of them warm-up)\n" in capsys.readouterr().out
    assert cli.main(["check", "recipe.yaml", "--num_processes", "2", "--data"]) == 0
    said = capsys.readouterr().out
    assert "\nsteps         8 rows, 10 steps in 10 epochs (2 of them warm-up)\n" in said
    assert said.count("\nsteps ") == 1


SMALL = {"vocab_size": 1031, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LOOKED_UP = [
    (GPT2Config, {"n_positions": 20}),
    (OPTConfig, {"max_position_embeddings": 20, "word_embed_proj_dim": 32, "ffn_dim": 32}),
    (GPTJConfig, {"n_positions": 20, "rotary_dim": 8}),
    (CTRLConfig, {"n_positions": 20, "dff": 32}),
]
COMPUTED = [
    (LlamaConfig, {"max_position_embeddings": 20, "intermediate_size": 32}),
    (GPTNeoXConfig, {"max_position_embeddings": 20, "intermediate_size": 32}),
    (XGLMConfig, {"max_position_embeddings": 20, "ffn_dim": 32}),
]


@pytest.mark.parametrize("kind, keys", LOOKED_UP + COMPUTED, ids=lambda value: getattr(value, "__name__", ""))
def test_rows_longer_than_the_models_positions(tmp_path, kind, keys):
    """An error where the model itself fails, a warning where it goes on."""
    import torch
    from transformers import AutoModelForCausalLM

    config = kind(**SMALL, **keys)
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    fails = False
    try:
        model(torch.zeros((1, 21), dtype=torch.long))
    except (IndexError, RuntimeError):
        fails = True
    assert fails == ((kind, keys) in LOOKED_UP)
    for tokens, length, found in (
        (20, "null", []),
        (21, "null", ["ZR175" if fails else "ZR176"]),
        (21, "64", ["ZR175" if fails else "ZR176"]),
        (21, "20", ["ZR553"]),  # the fix: rows are cut, and check says how many
    ):
        row = json.dumps({"input_ids": [5] * (tokens - 1) + [0], "labels": [5] * (tokens - 1) + [0]}) + "\n"
        keys = f"model_name_or_path: {tmp_path}\nmax_length: {length}"
        found_here = found_by_check(tmp_path / "case", keys, files={"rows/train.jsonl": row * 4})
        assert [code for code in found_here if code != "ZR514"] == found, (tokens, length)


@pytest.mark.parametrize("strategy, found", [("bfd", []), ("wrapped", ["ZR176"])])
def test_positions_begin_anew_in_a_pack_unless_it_is_wrapped(tmp_path, strategy, found):
    LlamaConfig(**SMALL, max_position_embeddings=30, intermediate_size=32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
    row = json.dumps({"input_ids": [5] * 20 + [0], "labels": [5] * 20 + [0]}) + "\n"
    keys = f"model_name_or_path: {tmp_path}\nmax_length: 64\npacking: true\npacking_strategy: {strategy}"
    assert found_by_check(tmp_path / "case", keys, files={"rows/train.jsonl": row * 40}) == found


def test_evaluation_rows_have_positions_too(tmp_path):
    GPT2Config(**SMALL, n_positions=20).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path)
    lines = [json.dumps({"input_ids": [5] * n + [0], "labels": [5] * n + [0]}) + "\n" for n in (9, 30)]
    files = {"rows/train.jsonl": lines[0] * 4, "rows/test.jsonl": lines[1]}
    keys = f"model_name_or_path: {tmp_path}"
    assert found_by_check(tmp_path / "case", keys, files=files) == []
    assert found_by_check(tmp_path / "case", f"{keys}\neval_strategy: steps", files=files) == ["ZR175"]


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}


@pytest.mark.parametrize(
    "config, limit",
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "linear", "factor": 4.0}), 16384),
        (LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), None),
        # Llama 3.1's: the positions that the config names are the stretched ones already
        (LlamaConfig(max_position_embeddings=131_072, rope_parameters=LLAMA_3), 131_072),
        (LlamaConfig(max_position_embeddings=8192, rope_parameters=LLAMA_3), 65_536),
        (FalconConfig(alibi=True), None),
        (FalconConfig(alibi=False, max_position_embeddings=2048), 2048),
    ],
)
def test_how_far_the_positions_of_a_model_go(config, limit):
    assert position_limit(config) == limit


def test_rehearsals_ignore_the_schedule_of_their_three_steps():
    from zero_recipes.tools.rehearse.launches import ignored_in

    settings = settings_with(warmup_steps=200, ignore=["ZR608"], use_peft=True)
    assert {*ignored_in(settings, is_whole=False)} == {"ZR608", *CODES}
    of_one_layer = settings.replace(peft_config={"layers_to_transform": [7]})
    assert {*ignored_in(of_one_layer, is_whole=False)} == {"ZR608", "ZR446", *CODES}, "the small model lacks that layer"
    assert {*ignored_in(of_one_layer, is_whole=True)} == {"ZR608", *CODES}
