"""`zero-recipes ask`: what it reads, refuses and scores, on the tiny world's base and models made of it."""

import json
import os
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.helpers.tiny import ROOT
from tests.helpers.tools import flip
from zero_recipes.checkpoint.checksums import write_checksums
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.metrics.read_runs import SampleRow, read_samples
from zero_recipes.tools import main as cli
from zero_recipes.training import answers

BASE = ROOT / "tiny_world" / "base"
ROWS = [json.loads(line) for line in (ROOT / "tiny_world" / "test.jsonl").read_text().splitlines()[:40:10]]
FORMAT = ["--dataset_format", "alpaca", "--sample_max_new_tokens", "5"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """The base with other numbers, float32: a model of the same shape."""
    folder = tmp_path_factory.mktemp("tuned") / "model"
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("count", "requested", "places_of"),
    [
        (256, 2, (254, 2)),
        (256, 128, (128, 128)),
        (256, 129, (128, 128)),  # half of the places are the prompt's
        (256, 4000, (128, 128)),
        (1, 5, (1, 1)),
        (0, 5, (sys.maxsize - 5, 5)),  # positions without an end
    ],
)
def test_a_long_answer_leaves_half_of_the_places_to_the_prompt(count, requested, places_of):
    config = LlamaConfig(max_position_embeddings=count)
    assert answers.places(SimpleNamespace(config=config), requested) == places_of


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter") / "lora"
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=3, init_lora_weights=False, target_modules="all-linear"))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def ask(*words) -> int:
    try:
        return cli.main(["ask", *map(str, words)])
    except SystemExit as error:  # argparse's own
        return error.code


def refused(capsys, *words) -> str:
    capsys.readouterr()
    assert ask(*words) == 2
    return capsys.readouterr().err


def answered(out: Path) -> list[SampleRow]:
    return read_samples(out / "samples.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "words", "wanted"),
    [
        ("a.jsonl", '{"instruction": "Say x.", "input": "", "output": "x"}\n', FORMAT, (alpaca_prompt("Say x."), "x")),
        ("a.json", '\n{"prompt": "Say x.", "completion": "x"}\n', [], ("Say x.", "x")),
        ("a", '{"prompt": "Say x."}', [], ("Say x.", None)),
    ],
)
def test_prompts_are_rows(tmp_path, name, text, words, wanted, capsys):
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    assert (
        ask(BASE, "--sample_prompts", tmp_path / name, "--output_dir", out, "--sample_max_new_tokens", 2, *words) == 0
    )
    (row,) = answered(out)
    assert (row.prompt, row.reference, row.before) == (*wanted, None)
    printed = capsys.readouterr().out
    assert ("after  (1 rows)" in printed) == (wanted[1] is not None) and "base: none" in printed


@pytest.fixture(scope="module")
def places(tmp_path_factory, tuned, adapter) -> dict[str, Path]:
    """Models with something wrong."""
    folder = tmp_path_factory.mktemp("places")
    found = {name: shutil.copytree(BASE, folder / name) for name in ("changed", "cut", "mute", "pickle", "swapped")}
    write_checksums(found["changed"])
    flip(found["changed"] / "model.safetensors", random.Random(5))
    os.truncate(found["cut"] / "model.safetensors", 10_000)
    for path in found["mute"].glob("tokenizer*"):
        path.unlink()
    (found["pickle"] / "model.safetensors").rename(found["pickle"] / "pytorch_model.bin")
    tokenizer = json.loads((BASE / "tokenizer.json").read_text())
    numbers = tokenizer["model"]["vocab"]
    first, second = list(numbers)[300:302]
    numbers[first], numbers[second] = numbers[second], numbers[first]
    (found["swapped"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    found["unnamed"] = shutil.copytree(adapter, folder / "unnamed")
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (found["unnamed"] / "adapter_config.json").write_text(json.dumps(config))
    return found | {"tuned": tuned, "adapter": adapter}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "ZR784"),
        ([BASE], "ZR570"),
        ([BASE, "--sample_prompts", "nowhere.jsonl"], "ZR589"),
        ([BASE, "--sample_prompts", "{rows}", "--output_dir", "{full}", *FORMAT], "ZR793"),
        ([BASE, "--max_lenth", "3"], "ZR103"),
        (["{cut}", "--sample_prompts", "{rows}", *FORMAT], "ZR787"),
        (["{changed}", "--sample_prompts", "{rows}", *FORMAT], "ZR787"),
        (["{mute}", "--sample_prompts", "{rows}", *FORMAT], "ZR575"),
        (["{pickle}", "--sample_prompts", "{rows}", *FORMAT], "ZR784"),
        (["{tuned}", "--base", "{swapped}", "--sample_prompts", "{rows}", *FORMAT], "2 tokens of"),
        (["{tuned}", "--base", "./nowhere", "--sample_prompts", "{rows}", *FORMAT], "ZR444"),
        (["{adapter}", "--base", "none", "--sample_prompts", "{rows}"], "ZR788"),
        (["{unnamed}", "--sample_prompts", "{rows}"], "ZR788"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_asked_is_refused(words, message, tmp_path, places, prompts, capsys, monkeypatch):
    """Before any weight is loaded."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("zero_recipes.tools.ask.load_model", lambda *_: pytest.fail("weights were loaded"))
    (tmp_path / "samples.jsonl").write_text("kept")
    named = places | {"rows": prompts, "full": tmp_path}
    assert message in refused(capsys, *(str(word).format(**named) for word in words))
    assert (tmp_path / "samples.jsonl").read_text() == "kept"


def test_code_that_a_model_brings_does_not_run_unasked(tmp_path, prompts, capsys):
    """Not by its recipe's word either: a folder may be a stranger's."""
    folder = shutil.copytree(BASE, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "stranger", "auto_map": names}))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    recipe = f"model_name_or_path: {folder}\ntrust_remote_code: true\nenv:\n  ASK_WAS_HERE: x\n"
    (folder / "recipe.resolved.yaml").write_text(recipe)
    message = refused(capsys, folder, "--sample_prompts", prompts)
    assert "[ZR787]" in message and "--trust_remote_code" in message and not (tmp_path / "ran").exists()
    assert "ASK_WAS_HERE" not in os.environ


def test_no_answers_are_written_over(prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ask(BASE, "--base", BASE, "--sample_prompts", prompts, *FORMAT) == 0
    assert ask(BASE, "--base", BASE, "--sample_prompts", prompts, *FORMAT) == 2 and "ZR793" in capsys.readouterr().err
    assert all(row.before == row.after for row in answered(Path("output/ask-base")))


def test_an_adapter_switched_off_is_its_base(adapter, prompts, tmp_path):
    """Its run's quantization is not asked for: the base has its own weights here."""
    folder = shutil.copytree(adapter, tmp_path / "qlora")
    recipe = f"model_name_or_path: {BASE}\nload_in_4bit: true\nuse_peft: true\ndtype: float32\nbf16: false\n"
    (folder / "recipe.resolved.yaml").write_text(recipe + "dataset_format: alpaca\nskip_checksums: true\n")
    words = ("--sample_prompts", prompts, "--output_dir")
    assert ask(adapter, *words, tmp_path / "a", *FORMAT) == ask(BASE, *words, tmp_path / "b", *FORMAT) == 0
    assert ask(folder, *words, tmp_path / "c", "--sample_max_new_tokens", 5) == 0
    both, base, wide = (answered(tmp_path / name) for name in "abc")
    assert [row.before for row in both] == [row.after for row in base]
    assert [row.scores_before for row in both] == [row.scores_after for row in base]
    assert any(row.scores_after != row.scores_before for row in both)
    for row, known in zip(wide, base, strict=True):
        assert row.scores_before["reference_loss"] == pytest.approx(known.scores_after["reference_loss"], abs=0.1)
        assert row.scores_before["reference_loss"] != known.scores_after["reference_loss"]  # float32 here, bf16 there
