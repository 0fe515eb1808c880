"""Make the tiny world's rows, its tokenizer and its base model.

    python -m tiny_world.pretrain               # writes the rows beside this file and the base into tiny_world/base

The base is a GPT-NeoX of about a million parameters with Pythia's two special tokens. It is trained on the plain
text only, so it continues text and does not answer instructions.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from tiny_world.world import (
    FOLDER,
    RELATIONS,
    Row,
    World,
    data_sets,
    make_world,
    pretraining_documents,
    write_data_sets,
)
from zero_recipes.data.forms import alpaca_prompt

BASE = FOLDER / "base"
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"  # ids 0 and 1, as in Pythia
VOCABULARY = 1536  # at most; enough for every creature's name to be one token, which an answer can copy in one step
LONGEST = 256  # tokens


def tokenizer_texts(documents: list[str], training_rows: list[Row]) -> list[str]:
    """What the tokenizer is made from: the text, and the training prompts ten times over.

    With the prompts counted once, the words of Alpaca's wrapper stay in many pieces and a prompt takes twice as
    many tokens. No row of the validation or test set is among these texts.
    """
    prompts = [alpaca_prompt(row["instruction"], row["input"]) for row in training_rows]
    return documents + prompts * 10


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE. Padding has a token of its own, so that masking it never hides the end of a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=LONGEST,
        # GPT-NeoX takes no token types; without this line they are produced and generate() refuses them.
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> GPTNeoXForCausalLM:
    """An untrained model, whose special token ids are those of the tokenizer."""
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LONGEST,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return GPTNeoXForCausalLM(config)


def train(model: GPTNeoXForCausalLM, stream: torch.Tensor, steps: int, seed: int) -> list[float]:
    """Next-token training in float32; returns the loss of every step (nats per token).

    `stream` is every document in one row of token ids, shape [tokens]. A step takes 32 windows of 128 tokens from
    random places of it.
    """
    rows, length, peak = 32, 128, 3e-3
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=0.05)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(stream) - length, (rows,), generator=draw)
        windows = torch.stack([stream[start : start + length] for start in starts])  # [rows, length]
        loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step:4d} of {steps}  loss {losses[-1]:.3f}  {time.monotonic() - started:4.0f} s", flush=True)
    return losses


def fact_stems(world: World) -> list[tuple[str, str]]:
    """Each fact as the beginning of a plain sentence and the word that completes it."""
    return [
        (RELATIONS[kind].statements[1].split("{value}")[0].format(name=name).rstrip(), value)
        for name, facts in world.items()
        for kind, value in facts.items()
    ]


@torch.no_grad()
def completed_share(
    model: GPTNeoXForCausalLM, tokenizer: PreTrainedTokenizerFast, stems: list[tuple[str, str]]
) -> float:
    """Share of the stems that the model, choosing the likeliest token each time, completes with the right word."""
    model.eval()
    right = 0
    for first in range(0, len(stems), 200):
        part = stems[first : first + 200]
        batch = tokenizer([stem for stem, _ in part], return_tensors="pt", padding=True, padding_side="left")
        out = model.generate(**batch, max_new_tokens=5, do_sample=False)
        texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        # The whole word is compared: cut at the full stop that ends the sentence.
        right += sum(text.split(".")[0].strip() == value for text, (_, value) in zip(texts, part, strict=True))
    return right / len(stems)


def main() -> None:
    cli = argparse.ArgumentParser(description="Make the rows, the tokenizer and the base model of the tiny world.")
    cli.add_argument("--out", type=Path, default=BASE, help="folder of the base model")
    cli.add_argument("--steps", type=int, default=800)
    cli.add_argument("--seed", type=int, default=0, help="of the weights and of the training windows")
    cli.add_argument("--threads", type=int, default=2)
    args = cli.parse_args()
    started = time.monotonic()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    torch.manual_seed(args.seed)

    print("rows:", write_data_sets())
    world = make_world()
    documents = pretraining_documents(world)
    rows = data_sets(world)["train"]
    tokenizer = make_tokenizer(tokenizer_texts(documents, rows))
    end = tokenizer.eos_token_id
    stream = torch.tensor([token for ids in tokenizer(documents)["input_ids"] for token in [*ids, end]])
    prompts = tokenizer([alpaca_prompt(row["instruction"], row["input"]) for row in rows])["input_ids"]
    lengths = [len(ids) for ids in prompts]
    model = make_model(tokenizer)
    print(
        f"{model.num_parameters():,} parameters, vocabulary of {len(tokenizer)}, {len(documents):,} documents of "
        f"{len(stream):,} tokens, training prompts of {min(lengths)} to {max(lengths)} tokens",
        flush=True,
    )
    losses = train(model, stream, args.steps, args.seed)

    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # What was written is measured, not what was trained: bfloat16 keeps eight bits of each weight.
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    share = completed_share(saved, AutoTokenizer.from_pretrained(args.out), fact_stems(world))
    record = {
        "seed": args.seed,
        "steps": args.steps,
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "creatures": len(world),
        "documents": len(documents),
        "text_tokens": len(stream),
        "prompt_tokens": {"shortest": min(lengths), "longest": max(lengths)},
        "loss_first_step": round(losses[0], 4),
        "loss_last_20_steps": round(sum(losses[-20:]) / len(losses[-20:]), 4),
        "facts_completed_share": round(share, 4),
        "seconds": round(time.monotonic() - started),
        "threads": args.threads,
        "torch": torch.__version__,
    }
    (args.out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
