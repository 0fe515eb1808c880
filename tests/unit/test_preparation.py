"""Rows are made once, before the model, and are those that SFTTrainer would have made; nobody waits for the dead."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from zero_recipes.core.findings import Refusal
from zero_recipes.data.audit import audit, audit_findings
from zero_recipes.data.prepare import apply_chat_template_file, finish, tokenise
from zero_recipes.data.samples import _sample

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tiny_world" / "base"
WORDS = ["The fish hums. ", "The cat barks in the cave. ", "It is red. "]
PAIRS = [{"prompt": f"Say {i}.\n", "completion": WORDS[i % 3] * (1 + i % 9)} for i in range(40)]
TEXTS = [{"text": WORDS[i % 3] * (1 + i % 9)} for i in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}."}, {"role": "assistant", "content": WORDS[i % 3] * (1 + i % 9)}]}
    for i in range(40)
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|endoftext|>{% endgeneration %}{% else %}{{ message['content'] }}"
    "<|endoftext|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def arguments(folder: Path, **keys) -> SFTConfig:
    sound = {"use_cpu": True, "bf16": False, "report_to": "none", "activation_checkpointing": False, "max_length": 64}
    return SFTConfig(output_dir=str(folder), **(sound | keys))


@pytest.mark.parametrize(
    "rows, keys",
    [
        (PAIRS, {}),
        (PAIRS, {"completion_only_loss": False, "truncation_mode": "keep_end", "max_length": 16}),
        (PAIRS, {"packing": True, "packing_strategy": "bfd"}),
        (PAIRS, {"packing": True, "packing_strategy": "wrapped", "shuffle_dataset": True}),
        (TEXTS, {"shuffle_dataset": True}),
        (CHATS, {}),
        (CHATS, {"assistant_only_loss": True}),
        (CHATS, {"chat_template_path": "chatml.jinja"}),
        (CHATS, {"chat_template_path": "clone"}),
    ],
)
def test_rows_are_those_that_sft_trainer_makes(tmp_path, monkeypatch, rows, keys):
    monkeypatch.chdir(tmp_path)
    Path("chatml.jinja").write_text(CHATML)
    source = AutoTokenizer.from_pretrained(BASE)
    source.chat_template = CHATML
    source.add_tokens(["<|im_start|>"])
    source.save_pretrained("clone")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHATML
    before, data, training_args = len(tokenizer), Dataset.from_list(rows), arguments(tmp_path, **keys)

    dressed = apply_chat_template_file(tokenizer, training_args)
    ours = finish(tokenise(data, dressed, training_args), dressed, training_args, training_args.packing)
    assert len(tokenizer) == before, "SFTTrainer must still find the tokens that it adds"

    trainer = SFTTrainer(model=str(BASE), args=training_args, train_dataset=data, processing_class=tokenizer)
    theirs = trainer.train_dataset
    assert ours["input_ids"][:] == theirs["input_ids"][:] and ours["labels"][:] == theirs["labels"][:]
    if training_args.packing and training_args.packing_strategy == "bfd":
        assert ours["seq_lengths"][:] == theirs["seq_lengths"][:]
    if keys.get("chat_template_path") == "clone":
        assert ours["input_ids"][0][0] == before, "the cloned token"


def test_a_chat_models_prompt_to_the_byte(tmp_path):
    """Qwen 2.5's template, as TRL carries it: the same words in training and in generation."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    template = Path(trl.__file__).with_name("chat_templates") / "qwen2_5_training.jinja"
    keys = {"chat_template_path": str(template), "assistant_only_loss": True, "eos_token": "<|im_end|>"}
    training_args = arguments(tmp_path, max_length=None, **keys)
    dressed = apply_chat_template_file(tokenizer, training_args)
    chat = {"messages": [{"role": "user", "content": "Hund?"}, {"role": "assistant", "content": "dog"}]}
    rows = Dataset.from_list([chat])
    tokenised = tokenise(rows, dressed, training_args)
    prompt = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHund?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids, labels = tokenised[0]["input_ids"], tokenised[0]["labels"]
    assert dressed.decode(ids) == prompt + "dog<|im_end|>\n"
    # TRL's template has the line break before the answer inside its {% generation %}
    assert dressed.decode([label for label in labels if label != -100]) == "\ndog<|im_end|>\n"
    sample = _sample(chat, dressed)
    assert (sample.prompt, sample.reference, sample.templated) == (prompt, "dog", True)
    asked = dressed(sample.prompt, add_special_tokens=False)["input_ids"]
    assert ids[: len(asked)] == asked
    found = audit(rows, tokenised, finish(tokenised, dressed, training_args, False), dressed, training_args)
    assert audit_findings(found, rows, dressed) == []


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    with pytest.raises(Refusal, match="ZR509"):
        apply_chat_template_file(tokenizer, arguments(tmp_path, eos_token="<|none|>"))
    with pytest.raises(Refusal, match="ZR511"):
        apply_chat_template_file(tokenizer, arguments(tmp_path, chat_template_path=str(tmp_path / "nothing")))
