"""The tiny world: its sets stay apart, its text teaches no instruction, and the committed files are what it makes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_world import pretrain, tuning, world


@pytest.fixture(scope="module")
def creatures():
    return world.make_world()


@pytest.fixture(scope="module")
def sets(creatures):
    return world.data_sets(creatures)


@pytest.mark.parametrize("label", ["train", "validation", "test"])
def test_committed_rows_are_what_the_seed_makes(label, sets):
    assert (world.FOLDER / f"{label}.jsonl").read_text(encoding="utf-8") == world.as_jsonl(sets[label])


def test_the_base_knows_the_facts_and_answers_no_instruction(creatures, sets):
    model = AutoModelForCausalLM.from_pretrained(pretrain.BASE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(pretrain.BASE)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|padding|>")
    assert pretrain.completed_share(model, tokenizer, pretrain.fact_stems(creatures)[::5]) >= 0.95
    said = tuning.answers(model, tokenizer, sets["test"][:20])
    assert all(said) and not any(answer == row["output"] for answer, row in zip(said, sets["test"], strict=False)), (
        "it says something, only not the answer"
    )
