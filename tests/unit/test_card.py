"""A model's card shows other people's names and answers as text; a run's token is written nowhere."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.unit.test_metrics import OK_ROW
from zero_recipes.config.command_line import words_without_tokens
from zero_recipes.config.resolved_recipe import write_resolved
from zero_recipes.training import card

HOSTILE = (
    "<script>alert(1)</script>",
    "a | b",
    "x` <b>y</b> `z",
    "[click](https://evil.example)",
    "![](https://evil.example/pixel.png)",
    "**loud** _quiet_ ~~gone~~",
    "one\n\n# two\n---\n<div>",
    "````\n</details>",
    "&lt;i&gt; \\",
    "plain_name 1.0",
)
TEXT = st.text(st.sampled_from([*"<>&|`[]()!*_~\\#-$\"'\n ab:/", "é"]), min_size=1, max_size=30)


def shown(markdown: str) -> tuple[list[str], set[str]]:
    """(texts, kinds of elements beside them) of a page as a reader sees it."""
    texts, kinds = [], set()
    for token in MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(markdown):
        kinds.add(token.type)
        line = ""
        for child in token.children or ():
            is_break = child.type == "html_inline" and child.content == "<br>"
            if not is_break and child.type not in ("text", "text_special", "code_inline", "softbreak", "image"):
                kinds.add(child.type)
            if child.type == "image":
                kinds.add(child.attrs["src"])
            line += "\n" if is_break else child.content
        texts.append(line)
    return texts, kinds


def written(folder: Path, hostile: str, recipe: dict | None = None) -> str:
    """A card whose every text is hostile."""
    row = OK_ROW | {"name": hostile, "model": hostile, "model_revision": hostile, "strategy": hostile, "device": "cpu"}
    row |= {"loss_history": []}  # no picture is drawn
    row |= {"versions": {hostile: hostile}, "hardware": {"cpu": hostile, "cpu_cores": 2}}
    (folder / "metrics.json").write_text(json.dumps(row))
    sample = {"prompt": hostile, "before": hostile, "after": hostile, "reference": None}
    sample |= {"scores_before": {hostile: 0.5}, "scores_after": {hostile: 1.0}}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe or {"run_name": hostile, "seed": 1}))
    card.write_card(folder)
    return (folder / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("card")


@pytest.fixture(scope="module")
def harmless(folder) -> tuple[list[str], set[str]]:
    return shown(ModelCard(written(folder, "plain")).text)


def _examples(test):
    for text in HOSTILE:
        test = example(hostile=text)(test)
    return test


@_examples
@settings(max_examples=30)
@given(hostile=TEXT.filter(str.strip))
def test_hostile_names_are_text(folder, harmless, hostile):
    texts, kinds = shown(ModelCard(written(folder, hostile)).text)
    plain, plain_kinds = harmless
    assert kinds == plain_kinds, "no element more or less than where the names are harmless"
    assert len(texts) == len(plain)
    for text, as_plain in zip(texts, plain, strict=True):
        if as_plain == "plain":  # a cell with nothing but the text
            assert text.split() == hostile.split()


def test_names_that_need_nothing_stay_as_they_are(folder):
    text = written(folder, "exact_match")
    assert "| exact_match | 0.500 | 1.000 | 1 |" in text and "Base model | `exact_match`" in text


def test_a_token_is_not_written_again(tmp_path):
    keys = {"seed": 1, "hub_token": "hf_secret", "model_init_kwargs": {"token": "hf_secret", "dtype": "auto"}}
    write_resolved(keys, tmp_path / "resolved.yaml", ["of a test"], None)
    text = (tmp_path / "resolved.yaml").read_text()
    assert "hf_secret" not in text and "set HF_TOKEN" in text
    assert yaml.safe_load(text) == {"seed": 1, "model_init_kwargs": {"dtype": "auto"}}
    write_resolved({"seed": 1}, tmp_path / "resolved.yaml", ["of a test"], None)
    assert "HF_TOKEN" not in (tmp_path / "resolved.yaml").read_text()


@pytest.mark.parametrize("words", [["--hub_token", "hf_secret"], ["--hub-token=hf_secret"], ["--hub_token=hf_secret"]])
def test_a_command_line_is_written_without_its_token(words):
    written = words_without_tokens(["--seed", "1", *words, "--bf16", "true"])
    assert "hf_secret" not in " ".join(written) and "***" in " ".join(written)
    assert (written[:2], written[-2:]) == (["--seed", "1"], ["--bf16", "true"])
