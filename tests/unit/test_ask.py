"""`zero-recipes ask`: what it reads, refuses and scores, on the tiny world's base and models made of it."""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import socket
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rouge_score import rouge_scorer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import ROOT
from zero_recipes.ask.answers import Asked, compare, perplexities
from zero_recipes.ask.chat import wording
from zero_recipes.ask.show import show
from zero_recipes.cli import main as cli
from zero_recipes.data.load import alpaca_prompt
from zero_recipes.data.samples import Sample
from zero_recipes.metrics.read_runs import SampleRow, read_runs, read_samples
from zero_recipes.report import judge_runs, write_report
from zero_recipes.training.samples import Answers
from zero_recipes.training.scores import rouge

BASE = ROOT / "tiny_world" / "base"
ROWS = [json.loads(line) for line in (ROOT / "tiny_world" / "test.jsonl").read_text().splitlines()[:40:10]]
FORMAT = ["--dataset_format", "alpaca", "--max_new_tokens", "5"]


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
    return cli.main(["ask", *map(str, words)])


def refused(capsys, *words) -> str:
    capsys.readouterr()
    assert ask(*words) == 2
    said = capsys.readouterr().err
    assert said.count("refused: ") == 1, said
    return said


def answered(out: Path) -> list[SampleRow]:
    return read_samples(out / "samples.jsonl")


# scores


def test_rouge_is_rouge_scores_own_and_needs_no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asks the network"))
    draw = random.Random(1)
    words = ["red", "running", "runs", "houses", "house", "the", "of", "A", "cat.", "-", "語", ""]
    pairs = [tuple(" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(2)) for _ in range(50)]
    pairs += [("the cat sat", "the cat sat on the mat")]
    said, wanted = map(list, zip(*pairs, strict=True))
    found = [rouge(one, other) for one, other in zip(said, wanted, strict=True)]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for kind in ("rouge1", "rouge2", "rougeL"):
        expected = [scorer.score(target=b, prediction=a)[kind].fmeasure for a, b in pairs]
        assert [scores[kind] for scores in found] == pytest.approx(expected)
    by_hand = found[-1]  # 3 of 3 and of 6 words; 2 of 2 and of 5 pairs
    assert by_hand == pytest.approx({"rouge1": 2 / 3, "rouge2": 4 / 7, "rougeL": 2 / 3})


def test_perplexity_is_what_torch_makes_of_all_tokens_at_once(tuned, prompts, tmp_path, capsys):
    assert ask(tuned, "--base", BASE, "--prompts", prompts, "--output_dir", tmp_path / "out", *FORMAT) == 0
    said = capsys.readouterr().out
    rows = answered(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    totals = []
    for place, key in ((BASE, "scores_before"), (tuned, "scores_after")):
        model, losses = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval(), []
        for row, sample in zip(ROWS, rows, strict=True):
            asked = tokenizer(alpaca_prompt(row["instruction"], row["input"]))["input_ids"]
            answer = tokenizer(row["output"] + tokenizer.eos_token)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([asked + answer])).logits[0, len(asked) - 1 : -1]
            each = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none")
            losses.append(each)
            assert getattr(sample, key)["perplexity"] == pytest.approx(each.mean().exp().item(), rel=1e-4)
            assert getattr(sample, key)["reference_loss"] == pytest.approx(each.mean().item(), rel=1e-4)
        totals.append(torch.cat(losses).mean().exp().item())
    line = next(line for line in said.splitlines() if line.startswith(" perplexity")).split()
    assert [float(number) for number in line[1:3]] == pytest.approx(totals, abs=2e-3)


def test_perplexity_by_hand():
    assert perplexities([math.log(2), math.log(8)], [3, 1]) == (pytest.approx(2**1.5), pytest.approx([2.0, 8.0]))
    assert perplexities([1e4], [1])[1] == [math.inf]  # no OverflowError


def test_rows_without_a_score_on_one_side_count_on_neither():
    samples = [Sample("a", "x", labels=(-100, 5)), Sample("b", "y", labels=(-100, 5, 6)), Sample("c", None)]
    after = Answers(["x", "y", "z"], [0.5, 9.0, None])
    asked = compare(samples, Answers(["x", "x", "z"], [1.0, math.nan, None]), after)
    assert asked.scored == 2 and asked.means["exact_match"] == (0.5, 1.0)
    assert asked.means["reference_loss"] == (1.0, 0.5)
    assert asked.means["perplexity"] == (pytest.approx(math.e), pytest.approx(math.exp(0.5)))
    assert asked.rows[1].unscored == "the loss is not finite" and asked.rows[2].scores_after == {}
    alone = compare(samples, None, after)
    assert alone.means["exact_match"] == (None, 1.0) and alone.rows[0].before is None


def test_the_pages_output_is_made_from_the_demos_answers():
    """And its scores are those that the demo itself states."""
    from scripts import ask_page

    assert ask_page.main(["--check"]) == 0
    asked = ask_page.asked_again(read_samples(ask_page.ROWS))
    for row, known in zip(asked.rows, read_samples(ask_page.ROWS), strict=True):
        assert {name: row.scores_after[name] for name in known.scores_after} == pytest.approx(known.scores_after)


# reading


@pytest.mark.parametrize(
    ("name", "text", "words", "wanted"),
    [
        ("a.jsonl", '{"instruction": "Say x.", "input": "", "output": "x"}\n', FORMAT, (alpaca_prompt("Say x."), "x")),
        ("a.json", '\n{"prompt": "Say x.", "completion": "x"}\n', [], ("Say x.", "x")),
        ("a.jsonl", '{"prompt": "Say x."}\n', [], ("Say x.", None)),
        ("a.txt", "\nSay x.\r\n\n", [], ("Say x.", None)),
        ("a", "Say x.", FORMAT, (alpaca_prompt("Say x."), None)),
        ("a.txt", '{"prompt"', [], ('{"prompt"', None)),
    ],
)
def test_prompts_are_rows_or_lines(tmp_path, name, text, words, wanted, capsys):
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    assert ask(BASE, "--prompts", tmp_path / name, "--output_dir", out, "--max_new_tokens", 2, *words) == 0
    (row,) = answered(out)
    assert (row.prompt, row.reference, row.before) == (*wanted, None)
    assert (row.scores_after == {}) == (wanted[1] is None)
    said = capsys.readouterr().out
    assert ("nothing is scored" in said) == (wanted[1] is None) and "the model answers alone" in said


# refused before any weight is loaded


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nowhere"], "ZR784"),
        (["recipes"], "ZR795"),
        ([BASE], "ZR570"),
        ([BASE, "--chat", "--prompts", "x"], "ZR574"),
        ([BASE, "--prompts", "nowhere.jsonl"], "ZR517"),
        ([BASE, "--prompts", "{empty}"], "ZR571"),
        ([BASE, "--prompts", "{binary}"], "ZR572"),
        ([BASE, "--prompts", "{rows}"], "ZR519"),
        ([BASE, "--prompts", "{rows}", "--base", "./nowhere", *FORMAT], "ZR794"),
        ([BASE, "--prompts", "{rows}", "--output_dir", "{full}", *FORMAT], "ZR793"),
        ([BASE, "--prompts", "{rows}", "--output_dir", "README.md"], "ZR352"),
        ([BASE, "--max_new_tokens", "0"], "ZR350"),
        ([BASE, "--max_lenth", "3"], "ZR103"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_asked_is_refused(words, code, tmp_path, prompts, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "samples.jsonl").write_text("kept")
    places = {"empty": tmp_path / "empty.txt", "binary": tmp_path / "binary", "rows": prompts, "full": tmp_path}
    assert f"[{code}]" in refused(capsys, *(str(word).format(**places) for word in words))
    assert (tmp_path / "samples.jsonl").read_text() == "kept"


DAMAGE = {
    "ZR787": lambda folder: (folder / "model.safetensors").write_bytes((BASE / "model.safetensors").read_bytes()[:-7]),
    "ZR786": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    "ZR575": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
}


@pytest.mark.parametrize("code", DAMAGE)
def test_a_model_that_is_not_whole_is_refused(code, tmp_path, prompts, capsys):
    folder = shutil.copytree(BASE, tmp_path / "model")
    DAMAGE[code](folder)
    assert f"[{code}]" in refused(capsys, folder, "--prompts", prompts, *FORMAT)


def test_a_base_of_another_shape_or_vocabulary_is_refused(tuned, tmp_path, prompts, capsys):
    other = shutil.copytree(tuned, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    small = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(BASE).config.__class__(**config | {"num_hidden_layers": 1})
    )
    small.save_pretrained(other)
    words = ("--prompts", prompts, *FORMAT)
    said = refused(capsys, other, "--base", BASE, *words)
    assert "[ZR789]" in said and "num_hidden_layers" in said
    strange = shutil.copytree(BASE, tmp_path / "strange")
    text = json.loads((strange / "tokenizer.json").read_text())
    first, second = list(text["model"]["vocab"])[300:302]
    numbers = text["model"]["vocab"]
    numbers[first], numbers[second] = numbers[second], numbers[first]
    (strange / "tokenizer.json").write_text(json.dumps(text))
    said = refused(capsys, tuned, "--base", strange, *words)
    assert "[ZR790]" in said and "2 of its tokens" in said


def test_code_that_a_model_brings_does_not_run_unasked(tmp_path, prompts, capsys):
    """Not by its recipe's word either: a folder may be a stranger's."""
    folder = shutil.copytree(BASE, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "stranger", "auto_map": names}))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    recipe = f"model_name_or_path: {folder}\ntrust_remote_code: true\nenv:\n  ASK_WAS_HERE: x\n"
    (folder / "recipe.resolved.yaml").write_text(recipe)
    said = refused(capsys, folder, "--prompts", prompts)
    assert "[ZR787]" in said and "--trust_remote_code" in said and not (tmp_path / "ran").exists()
    assert "ASK_WAS_HERE" not in os.environ


def test_weights_that_no_memory_holds_are_refused(prompts, capsys, monkeypatch):
    from zero_recipes.core.host_limits import Host

    monkeypatch.setattr(Host, "memory", lambda self: (10**6, "a test"))
    said = refused(capsys, BASE, "--prompts", prompts, *FORMAT)
    assert "[ZR792]" in said and "1,147,136" in said


# what is written


def test_nothing_is_written_over(tmp_path, prompts, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert ask(BASE, "--prompts", prompts, *FORMAT) == 0
    folders = sorted(path.name for path in (tmp_path / "output").iterdir())
    assert folders == ["ask-base", "ask-base-2"]
    assert answered(tmp_path / "output" / "ask-base") == answered(tmp_path / "output" / "ask-base-2")


@pytest.mark.parametrize("base", ["none", BASE])
def test_a_report_shows_what_a_run_was_asked_later(base, prompts, tmp_path, capsys):
    shutil.copy(ROOT / "docs" / "demo" / "full" / "metrics.json", tmp_path)
    assert ask(BASE, "--base", base, "--prompts", prompts, "--output_dir", tmp_path, *FORMAT) == 0
    (run,) = read_runs(tmp_path)
    verdict, measured = judge_runs([run])[-1][1:3]
    page = Path(write_report(tmp_path)).read_text()
    assert "rougeL" in page and ("(no answer)" in page) == (base == "none")
    if base == "none":
        assert verdict == "cannot tell" and "before and after" in measured
    else:
        assert "0 of 4 answers changed" in measured


def test_an_adapter_switched_off_is_its_base(adapter, prompts, tmp_path, capsys):
    assert ask(adapter, "--prompts", prompts, "--output_dir", tmp_path / "a", *FORMAT) == 0
    assert "the adapter switched off" in capsys.readouterr().out
    assert ask(BASE, "--prompts", prompts, "--output_dir", tmp_path / "b", *FORMAT) == 0
    both, base = answered(tmp_path / "a"), answered(tmp_path / "b")
    assert [row.before for row in both] == [row.after for row in base]
    assert [row.scores_before for row in both] == [row.scores_after for row in base]
    assert any(row.scores_after != row.scores_before for row in both)
    capsys.readouterr()
    assert "[ZR788]" in refused(capsys, adapter, "--base", "none", "--prompts", prompts)
    unnamed = shutil.copytree(adapter, tmp_path / "unnamed")
    config = json.loads((unnamed / "adapter_config.json").read_text())
    (unnamed / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert "does not name one" in refused(capsys, unnamed, "--prompts", prompts)
    assert ask(unnamed, "--base", BASE, "--prompts", prompts, "--output_dir", tmp_path / "c", *FORMAT) == 0
    assert answered(tmp_path / "c") == both


def test_an_adapter_over_4_bit_is_asked_on_the_bases_own_weights(adapter, prompts, tmp_path, capsys):
    """Where bitsandbytes is not installed too."""
    folder = shutil.copytree(adapter, tmp_path / "qlora")
    recipe = f"model_name_or_path: {BASE}\nload_in_4bit: true\nuse_peft: true\ndtype: float32\nbf16: false\n"
    (folder / "recipe.resolved.yaml").write_text(recipe + "dataset_format: alpaca\n")
    words = ("--prompts", prompts, "--max_new_tokens", 2)
    assert ask(folder, *words, "--output_dir", tmp_path / "out") == 0
    assert "trained on a quantized base" in capsys.readouterr().out
    assert ask(BASE, *words, *FORMAT[:2], "--output_dir", tmp_path / "base") == 0
    for row, base in zip(answered(tmp_path / "out"), answered(tmp_path / "base"), strict=True):
        assert row.scores_before["reference_loss"] == pytest.approx(base.scores_after["reference_loss"], abs=0.1)
        assert row.scores_before["reference_loss"] != base.scores_after["reference_loss"]  # float32 here, bf16 there


def test_an_adapter_of_another_base_is_refused(adapter, tmp_path, prompts, fixtures, capsys):
    said = refused(capsys, adapter, "--base", fixtures / "stories260K", "--prompts", prompts)
    assert "[ZR787]" in said


def test_a_public_model_goes_on_with_a_text(fixtures, tmp_path, capsys):
    """stories260K, by its own words: real weights, a SentencePiece tokenizer, no recipe."""
    lines = tmp_path / "lines.txt"
    lines.write_text("Once upon a time, there was a little girl named\n")
    words = ("--prompts", lines, "--output_dir", tmp_path / "out", "--max_new_tokens", 12)
    assert ask(fixtures / "stories260K", *words) == 0
    (row,) = answered(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(fixtures / "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(fixtures / "stories260K")
    ids = tokenizer(row.prompt, return_tensors="pt")["input_ids"]
    direct = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert row.after == tokenizer.decode(direct, skip_special_tokens=True).strip() and len(row.after) > 10


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_width_shows_all_answers_and_no_order_to_the_terminal(width):
    rows = [SampleRow(prompt="[/a] q\x1b[2J", before=None, after="y" * 150, reference=None, scores_before={})]
    rows += [SampleRow(prompt="b", before="[bold]", after="\x1b]0;t\x07", reference="r" * 99, scores_before={})]
    console = Console(width=width, file=io.StringIO())
    show(Asked(rows, {"rouge1": (0.25, 0.5)}, 1), console, "base", "model")
    printed = console.file.getvalue()
    assert "\x1b" not in printed and max(map(len, printed.splitlines())) <= width
    assert printed.count("y") == 150 and printed.count("r") >= 99 and "[bold]" in printed and "[/a] q" in printed


# conversations


def talk(monkeypatch, capsys, text: str, *words) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert ask(*words, "--chat") == 0
    return capsys.readouterr().out


def test_a_pipe_is_a_conversation(adapter, tuned, monkeypatch, capsys):
    asked = "What colour is the kozob?\n\n/reset\nWhere does it live?\n/exit\nnever\n"
    words = (adapter, "--base", BASE, *FORMAT[:2], "--max_new_tokens", 6)
    said = talk(monkeypatch, capsys, asked, *words)
    assert said.count("you> ") == 4 and said.count("base> ") == said.count("model> ") == 2
    assert "(forgotten)" in said and "never" not in said and "Alpaca" in said
    said = talk(monkeypatch, capsys, "Once upon", tuned, "--max_new_tokens", 3)  # no last line break
    assert "plain text" in said and said.count("model> ") == 1 and "base> " not in said


def test_turns_are_kept_by_a_chat_template_and_dropped_where_there_is_no_room(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(BASE, tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
    (folder / "chat_template.jinja").write_text(template)
    seen = []
    model = type(AutoModelForCausalLM.from_pretrained(folder))
    original = model.generate
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(self, input_ids, **keywords):
        seen.append(tokenizer.decode(input_ids[0]))
        return original(self, input_ids=input_ids, **keywords)

    monkeypatch.setattr(model, "generate", generate)
    typed = "One.\nTwo.\n/reset\nThree.\n" + "far " * 200 + "\n"
    said = talk(monkeypatch, capsys, typed, folder, "--max_new_tokens", 2)
    assert seen[0] == "u:One.;a:" and seen[1].startswith("u:One.;a:") and seen[1].endswith(";u:Two.;a:")
    assert seen[2] == "u:Three.;a:" and "Three" not in seen[3]
    assert "the first 1 turns are forgotten" in said and "chat template writes" in said
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no user first') }}")
    said = refused(capsys, folder, "--chat")
    assert "[ZR573]" in said and "no user first" in said


def test_ctrl_c_ends_a_conversation(monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert ask(BASE, "--chat") == 0
    assert "you>" not in capsys.readouterr().out


def test_words_of_a_conversation():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", " b"), ("user", " c"))]
    assert wording(tokenizer, "alpaca").write(turns) == alpaca_prompt(" c")
    assert wording(tokenizer, None).write(turns) == "a b c"
