"""Rows are made once, before the model, and are those that SFTTrainer would have made; nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.helpers.tiny import write_recipe
from zero_recipes.core.errors import Refusal
from zero_recipes.core.process import free_port
from zero_recipes.data.audit import audit, audit_findings
from zero_recipes.data.prepare import dress, finish, tokenise
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

    dressed = dress(tokenizer, training_args)
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
    dressed = dress(tokenizer, training_args)
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
    with pytest.raises(Refusal, match="is not in the model's vocabulary"):
        dress(tokenizer, arguments(tmp_path, eos_token="<|none|>"))
    with pytest.raises(Refusal, match=r"neither a \.jinja file nor a model"):
        dress(tokenizer, arguments(tmp_path, chat_template_path=str(tmp_path / "nothing")))


def test_rows_are_made_once_by_one_process_and_kept(two, tmp_path):
    """Rank 0 tokenises both splits, rank 1 nothing; a second run finds them, a run with other arguments does not."""
    path = write_recipe(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, dataset_num_proc=2)
    argv = [str(path), "--output_dir", str(tmp_path / "out"), "--overwrite", "true"]
    cache = str(tmp_path / "cache")
    assert two.run("splits_tokenised", argv=argv, cache=cache) == [2, 0]
    assert two.run("splits_tokenised", argv=argv, cache=cache) == [0, 0]
    assert two.run("splits_tokenised", argv=[*argv, "--max_length", "99"], cache=cache) == [2, 0]
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_what_the_audit_refuses_is_refused_on_every_rank(two, tmp_path):
    path = write_recipe(tmp_path, max_length=2)
    refused = two.run("refusal_of", argv=[str(path), "--output_dir", str(tmp_path / "out")])
    assert refused == ["no row is left to train on"] * 2
    assert not (tmp_path / "out").exists()


def test_a_streamed_data_set_is_audited_at_its_start(two, tmp_path):
    path = write_recipe(tmp_path, dataset_streaming=True, max_steps=2)
    trained = two.run("train", argv=[str(path), "--output_dir", str(tmp_path / "out")])[0]
    assert trained["metrics"]["status"] == "ok" and trained["metrics"]["tokens"]["supervised"] > 0
    assert "240 rows" in (tmp_path / "out" / "recipe.resolved.yaml").read_text()


DYING = """
import os, signal, sys
import torch.distributed as dist
from zero_recipes.distributed.once_per_node import once_per_node

dist.init_process_group("gloo")
rank, dies = int(os.environ["RANK"]), int(sys.argv[1])

def work():
    if rank == dies:
        if os.fork() == 0:  # a tokeniser: it holds all sockets of its parent, and lives on until this test ends
            sys.stdin.read()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return "rows"

once_per_node(work)
sys.stdin.read()  # rank 0 holds the store until the others have ended
"""


@pytest.mark.parametrize("dies", [1, 0])
def test_nobody_waits_for_a_process_that_died(dies):
    """Three ranks on two machines (0 | 1 and 2). Where rank 1 dies, rank 2 says so; rank 0 takes the store with it."""
    port, ranks = free_port(), []
    for rank, local_rank in ((0, 0), (1, 0), (2, 1)):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "3"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", DYING, str(dies)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    if dies == 1:
        said = ranks[2].communicate(timeout=120)[0]
        assert "rank 1, which prepares the data of this machine, died without a message" in said
        assert ranks[2].returncode == 1
    ended = [rank.communicate(timeout=120)[0] for rank in ranks if rank.stdout and not rank.stdout.closed]
    assert ranks[dies].returncode == -signal.SIGKILL, ended
    if dies == 1:
        assert ranks[0].returncode == 0
