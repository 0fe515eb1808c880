"""The tiny world: its sets stay apart, its text teaches no instruction, and the committed files are what it makes."""

from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_world import pretrain, tuning, world
from zero_recipes.data.load import alpaca_prompt


@pytest.fixture(scope="module")
def creatures():
    return world.make_world()


@pytest.fixture(scope="module")
def sets(creatures):
    return world.data_sets(creatures)


def prompt_of(row):
    return alpaca_prompt(row["instruction"], row["input"])


@pytest.mark.parametrize("label", ["train", "validation", "test"])
def test_committed_rows_are_what_the_seed_makes(label, sets):
    assert (world.FOLDER / f"{label}.jsonl").read_text(encoding="utf-8") == world.as_jsonl(sets[label])


def test_no_prompt_and_no_answer_occurs_in_two_sets(sets):
    for kind in (prompt_of, lambda row: row["output"]):
        for one, other in combinations(sets.values(), 2):
            assert not set(map(kind, one)) & set(map(kind, other))


def test_the_text_of_the_base_holds_no_question_and_no_wrapper(creatures):
    text = "\n\n".join(world.pretraining_documents(creatures))
    patterns = [question for relation in world.RELATIONS.values() for question in relation.questions]
    openings = {words.split("{name}")[0] for words, _ in [*patterns, *world.DESCRIPTION_QUESTIONS]}
    for words in ("?", "###", "Below is an instruction", "Response:", "Instruction:", "Input:", *openings):
        assert words not in text


def test_the_base_knows_the_facts_and_answers_no_instruction(creatures, sets):
    model = AutoModelForCausalLM.from_pretrained(pretrain.BASE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pretrain.BASE)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|padding|>")
    assert pretrain.completed_share(model, tokenizer, pretrain.fact_stems(creatures)[::5]) >= 0.95
    said = tuning.answers(model, tokenizer, sets["test"][:20])
    assert all(said) and not any(answer == row["output"] for answer, row in zip(said, sets["test"], strict=False)), (
        "it says something, only not the answer"
    )
