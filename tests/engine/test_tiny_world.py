"""The tiny world: its sets stay apart, its text teaches no instruction, and the committed files are what it makes."""

import json
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tiny_world import choose, pretrain, tuning, world
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


@pytest.fixture(scope="module")
def record():
    return json.loads(choose.RECORD.read_text(encoding="utf-8"))


def prompt_of(row):
    return alpaca_prompt(row["instruction"], row["input"])


# The rows


@pytest.mark.parametrize("label", ["train", "validation", "test"])
def test_committed_rows_are_what_the_seed_makes(label, sets):
    committed = (world.FOLDER / f"{label}.jsonl").read_text(encoding="utf-8")
    assert committed == world.as_jsonl(sets[label])
    assert {tuple(json.loads(line)) for line in committed.splitlines()} == {("instruction", "input", "output")}


def test_another_seed_makes_another_world(creatures):
    assert world.make_world(seed=1) != creatures


def test_every_creature_belongs_to_exactly_one_set(creatures):
    split = world.split_creatures(creatures)
    assert {label: len(names) for label, names in split.items()} == world.SET_SIZES
    assert sorted(name for names in split.values() for name in names) == sorted(creatures)


def test_rows_name_only_the_creatures_of_their_set(creatures, sets):
    split = world.split_creatures(creatures)
    for label, rows in sets.items():
        named = {word.strip(".?") for row in rows for value in row.values() for word in value.split()}
        assert named & set(creatures) == set(split[label])


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


def test_both_of_alpacas_wrappers_are_used_in_every_set(sets):
    for rows in sets.values():
        with_input = sum(bool(row["input"]) for row in rows)
        assert 0.3 <= with_input / len(rows) <= 0.7


def test_answers_state_the_facts_and_exchanged_ones_do_not(creatures, sets):
    names = world.split_creatures(creatures)["test"]
    other = world.exchanged_facts(names, creatures)
    wrong = world.instruction_rows(names, other)
    assert [prompt_of(row) for row in wrong] == [prompt_of(row) for row in sets["test"]]
    same = sum(a["output"] == b["output"] for a, b in zip(wrong, sets["test"], strict=True)) / len(wrong)
    assert same < 0.12  # one in sixteen to be expected
    for row in sets["test"]:
        name = next(word.strip(".") for word in row["output"].split() if word.strip(".") in creatures)
        assert row["output"].rstrip(".").split()[-1] in creatures[name].values()


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


def test_the_text_states_every_fact_of_every_creature(creatures, text):
    sentences = {sentence.strip() for sentence in text.replace("\n", ". ").split(".")}
    for name, facts in creatures.items():
        for kind, value in facts.items():
            stated = {s.format(name=name, value=value).rstrip(".") for s in world.RELATIONS[kind].statements}
            assert stated & sentences, (name, kind)


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


def test_the_base_folder_is_small():
    files = [path for path in pretrain.BASE.rglob("*") if path.is_file()]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "pretraining.json"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_special_tokens_agree_everywhere(tokenizer, base):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|padding|>", 1)
    for config in (base[0].config, GenerationConfig.from_pretrained(pretrain.BASE)):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)
    assert base[0].config.vocab_size == len(tokenizer)


def test_the_base_loads_whole_and_was_saved_in_bfloat16(base):
    model, loading = base
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    assert model.config.model_type == "gpt_neox"
    assert AutoModelForCausalLM.from_pretrained(pretrain.BASE).dtype == torch.bfloat16
    stated = json.loads((pretrain.BASE / "pretraining.json").read_text(encoding="utf-8"))
    assert stated["parameters"] == model.num_parameters()


def test_the_base_knows_the_facts(creatures, base, tokenizer):
    stems = pretrain.fact_stems(creatures)[::5]
    assert len(stems) == 200
    assert pretrain.completed_share(base[0], tokenizer, stems) >= 0.95


def test_the_base_does_not_answer_instructions(base, tokenizer, sets):
    rows = sets["test"][:20]
    said = tuning.answers(base[0], tokenizer, rows)
    assert all(said)  # it says something, only not the answer
    assert tuning.compare(said, [row["output"] for row in rows])["exact_match"] == 0


# The tuning


def test_the_prompt_and_the_answer_are_cut_into_the_same_tokens_apart_as_together(tokenizer, sets):
    for row in sets["test"]:
        prompt, answer = tuning.encode(tokenizer, row)
        whole = tokenizer(prompt_of(row) + row["output"] + tokenizer.eos_token)["input_ids"]
        assert prompt + answer == whole
        assert len(answer) <= tuning.LONGEST_ANSWER
        assert len(whole) <= pretrain.LONGEST


def test_only_the_answer_and_its_end_carry_loss(tokenizer, sets):
    rows = sets["train"][:16]
    batch = tuning.collate(tokenizer, rows)
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        assert tokenizer.decode(ids[labels != -100]) == row["output"] + "<|endoftext|>"
    assert (batch["labels"] == -100).eq(batch["labels"] != batch["input_ids"]).all()
    assert (batch["attention_mask"] == 0).eq(batch["input_ids"] == tokenizer.pad_token_id).all()


def test_scores_by_hand():
    assert tuning.token_f1("The a is red.", "The a is blue.") == pytest.approx(0.75)
    assert tuning.token_f1("red red", "red") == pytest.approx(2 / 3)
    assert tuning.token_f1("", "red") == 0
    assert tuning.compare(["x", "y z"], ["x", "y"]) == {"exact_match": 0.5, "token_f1": pytest.approx(0.8333)}


def test_shuffled_outputs_keep_prompts_and_move_every_answer(sets):
    rows = sets["validation"]
    moved = tuning.shuffled_outputs(rows)
    assert [prompt_of(row) for row in moved] == [prompt_of(row) for row in rows]
    assert sorted(row["output"] for row in moved) == sorted(row["output"] for row in rows)
    assert sum(a["output"] == b["output"] for a, b in zip(moved, rows, strict=True)) < 0.02 * len(rows)


# The stated figures


def test_the_choice_follows_from_the_validation_figures(record):
    runs = record["runs"]
    rates = {run["learning_rate"] for run in runs}
    assert rates == set(choose.LEARNING_RATES)
    usual = choose.STEPS[0]
    assert record["choice"]["learning_rate"] == max(rates, key=lambda rate: choose.standing(runs, rate, usual))
    exact_match = {steps: choose.standing(runs, record["choice"]["learning_rate"], steps)[0] for steps in choose.STEPS}
    assert record["choice"]["steps"] == usual
    assert max(exact_match.values()) < exact_match[usual] + choose.WORTH  # no other number of steps gains enough
    assert all(sum(run["seed"] == seed for run in runs) == len(runs) / 3 for seed in (0, 1, 2))
    assert record["rows"] == {label: size * 18 for label, size in world.SET_SIZES.items()}


def test_the_figures_are_those_of_the_committed_base(record):
    assert record["base_sha256"] == choose.weights_digest()


def test_before_nothing_is_right_and_after_nearly_everything(record):
    before, after = record["test"]["before"], record["test"]["after"]
    assert before["references"]["exact_match"] == 0
    assert before["exact_match_when_cut"] == 0
    assert len(after) >= 3
    assert min(run["references"]["exact_match"] for run in after) >= 0.9


def test_wrong_references_score_no_more_than_they_agree_with_the_right_ones(record, creatures, sets):
    """Exact match is the control: token F1 rises on wrong references too, whose sentences have the same words."""
    true, names = sets["test"], world.split_creatures(creatures)["test"]
    wrong = {
        "references_of_other_rows": tuning.shuffled_outputs(true),
        "references_of_another_creature": world.instruction_rows(names, world.exchanged_facts(names, creatures)),
    }
    for label, rows in wrong.items():
        agreeing = sum(a["output"] == b["output"] for a, b in zip(rows, true, strict=True)) / len(true)
        assert record["test"]["before"][label]["exact_match"] == 0
        for run in record["test"]["after"]:
            assert run[label]["exact_match"] <= agreeing + 0.01


def test_tuning_makes_references_of_other_rows_less_likely(record):
    before, after = record["test"]["before"], record["test"]["after"]
    for run in after:
        assert run["references"]["loss"] < 0.1 * before["references"]["loss"]
        assert run["references_of_other_rows"]["loss"] > before["references_of_other_rows"]["loss"]


def test_training_on_shuffled_answers_teaches_no_answer(record):
    for run in record["test"]["after_shuffled_answers"]:
        assert run["references"]["exact_match"] <= 0.02
