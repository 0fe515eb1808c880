"""The tiny world: its sets stay apart, its text teaches no instruction, and the committed files are what it makes."""

import json
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tiny_world import pretrain, tuning, world
from zero_recipes.data.load import alpaca_prompt

WRAPPER_WORDS = ("###", "Below is an instruction", "Response:", "Instruction:", "Input:")


@pytest.fixture(scope="module")
def creatures():
    return world.make_world()


@pytest.fixture(scope="module")
def sets(creatures):
    return world.data_sets(creatures)


@pytest.fixture(scope="module")
def documents(creatures):
    return world.pretraining_documents(creatures)


@pytest.fixture(scope="module")
def text(documents):
    return "\n\n".join(documents)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(pretrain.BASE)


@pytest.fixture(scope="module")
def base():
    """The committed model in float32, with what loading it had to say."""
    model, loading = AutoModelForCausalLM.from_pretrained(pretrain.BASE, dtype=torch.float32, output_loading_info=True)
    return model, loading


def prompt_of(row):
    return alpaca_prompt(row["instruction"], row["input"])


# The rows


@pytest.mark.parametrize("label", ["train", "validation", "test"])
def test_committed_rows_are_what_the_seed_makes(label, sets):
    committed = (world.FOLDER / f"{label}.jsonl").read_text(encoding="utf-8")
    assert committed == world.as_jsonl(sets[label])
    assert {tuple(json.loads(line)) for line in committed.splitlines()} == {("instruction", "input", "output")}


def test_no_prompt_or_pair_occurs_in_two_sets(sets):
    prompts = {label: {prompt_of(row) for row in rows} for label, rows in sets.items()}
    pairs = {
        label: {(row["instruction"] + "\n" + row["input"], row["output"]) for row in rows}
        for label, rows in sets.items()
    }
    outputs = {label: {row["output"] for row in rows} for label, rows in sets.items()}
    for label, rows in sets.items():
        assert len(prompts[label]) == len(rows)  # nor twice in one
    for kind in (prompts, pairs, outputs):
        for one, other in combinations(kind.values(), 2):
            assert not one & other


# The text of the base model


def test_the_text_holds_no_question_and_no_wrapper(text):
    assert "?" not in text
    assert not [words for words in WRAPPER_WORDS if words in text]
    patterns = [q for relation in world.RELATIONS.values() for q in relation.questions] + list(
        world.DESCRIPTION_QUESTIONS
    )
    openings = {instruction.split("{name}")[0] for instruction, _ in patterns}
    assert len(openings) > 12
    assert not [opening for opening in openings if opening in text]


def test_the_tokenizer_is_made_without_validation_and_test_prompts(documents, sets, tokenizer):
    texts = pretrain.tokenizer_texts(documents, sets["train"])
    seen = set(texts)
    assert {prompt_of(row) for row in sets["train"]} <= seen
    for label in ("validation", "test"):
        assert not {prompt_of(row) for row in sets[label]} & seen
        named = set(world.split_creatures(world.make_world())[label])
        wrapped = {word.strip(".?") for text in texts if "###" in text for word in text.split()}
        assert not named & wrapped
    made = pretrain.make_tokenizer(texts)
    assert made.get_vocab() == tokenizer.get_vocab()  # the committed one is made from these texts


# The committed base


def test_special_tokens_agree_everywhere(tokenizer, base):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|padding|>", 1)
    for config in (base[0].config, GenerationConfig.from_pretrained(pretrain.BASE)):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)
    assert base[0].config.vocab_size == len(tokenizer)


def test_the_base_knows_the_facts(creatures, base, tokenizer):
    stems = pretrain.fact_stems(creatures)[::5]
    assert len(stems) == 200
    assert pretrain.completed_share(base[0], tokenizer, stems) >= 0.95


def test_the_base_does_not_answer_instructions(base, tokenizer, sets):
    rows = sets["test"][:20]
    said = tuning.answers(base[0], tokenizer, rows)
    assert all(said)  # it says something, only not the answer
    assert tuning.compare(said, [row["output"] for row in rows])["exact_match"] == 0
