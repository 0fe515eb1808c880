"""A conversation in the terminal: the model, and its base beside it where there is one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from zero_recipes.ask.load import Loaded
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.core.tables import shown
from zero_recipes.data.load import alpaca_prompt
from zero_recipes.training.generation import places

COMMANDS = "/reset forgets the conversation, /exit (or Ctrl-D) ends it."


@dataclass(frozen=True)
class Wording:
    """How a conversation becomes the text that a model goes on with."""

    said: str  # at the beginning: what people should know of it
    keeps_turns: bool  # whether earlier turns are part of it
    templated: bool  # whether the special tokens are in the text already
    write: Callable[[list[dict[str, str]]], str]


def wording(tokenizer: PreTrainedTokenizerBase, dataset_format: str | None) -> Wording:
    """The chat template; without one the recipe's Alpaca wrapper; without either plain text. Raises Refusal."""
    if tokenizer.chat_template:

        def write(turns: list[dict[str, str]]) -> str:
            try:
                return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program, and says what it likes
                raise refusal("ZR573", name=type(error).__name__, error=first_line(error)) from error

        write([{"role": "user", "content": "a"}])
        return Wording("The model's chat template writes the conversation.", True, True, write)
    if dataset_format == "alpaca":
        said = "No chat template: each message is asked alone, as an instruction in Alpaca's words."
        return Wording(said, False, False, lambda turns: alpaca_prompt(turns[-1]["content"]))
    said = "No chat template and no dataset_format: the model goes on with the plain text of what was written so far."
    return Wording(said, True, False, lambda turns: "".join(turn["content"] for turn in turns))


@dataclass
class Side:
    """One model of the conversation, with what it has answered."""

    name: str
    loaded: Loaded
    switched_off: bool = False  # the base of an adapter
    turns: list[dict[str, str]] = field(default_factory=list)


def chat(sides: list[Side], words: Wording, max_new_tokens: int) -> None:
    """Until /exit, the end of the input or Ctrl-C. Answers are greedy and appear word by word."""
    typed = sys.stdin.isatty()
    print(f"{words.said} {COMMANDS}", flush=True)
    try:
        for text in _lines(typed):
            if text == "/exit":
                return
            if text == "/reset":
                for side in sides:
                    side.turns.clear()
                print("(forgotten)", flush=True)
                continue
            for side in sides:
                _turn(side, text, words, max_new_tokens)
    except KeyboardInterrupt:
        pass
    finally:
        print(flush=True)


def _lines(typed: bool) -> Iterator[str]:
    """What is written, without blanks around it and without empty lines. Of a pipe it is printed, to be read later."""
    while True:
        try:
            text = input("\nyou> ") if typed else next(iter(sys.stdin.readline, ""), None)
        except EOFError:
            return
        except UnicodeDecodeError as error:
            print(f"(not read: {first_line(error)})", flush=True)
            continue
        if text is None:
            return
        if text.strip():
            if not typed:
                print(f"\nyou> {shown(text.strip())}", flush=True)
            yield text.strip()


def _turn(side: Side, text: str, words: Wording, max_new_tokens: int) -> None:
    loaded, tokenizer = side.loaded, side.loaded.tokenizer
    side.turns.append({"role": "user", "content": text})
    room, most = places(loaded.model, max_new_tokens)
    ids = _ids(side, words)
    dropped = 0
    while len(ids) > room and len(side.turns) > 1:
        del side.turns[:2]
        dropped += 1
        ids = _ids(side, words)
    if dropped:
        print(f"(the first {dropped} turns are forgotten: the model takes {room:,} tokens)", flush=True)
    print(f"{side.name}> ", end="", flush=True)
    with torch.no_grad(), loaded.computing():
        if side.switched_off:
            with loaded.without_adapter():
                answered = _generate(loaded, ids[-room:], most)
        else:
            answered = _generate(loaded, ids[-room:], most)
    content = tokenizer.decode(answered, skip_special_tokens=True)
    side.turns.append({"role": "assistant", "content": content.strip() if words.templated else content})


def _ids(side: Side, words: Wording) -> list[int]:
    turns = side.turns if words.keeps_turns else side.turns[-1:]
    return side.loaded.tokenizer(words.write(turns), add_special_tokens=not words.templated)["input_ids"]


def _generate(loaded: Loaded, ids: list[int], max_new_tokens: int) -> list[int]:
    tokenizer = loaded.tokenizer
    asked = torch.tensor([ids], device=loaded.device)
    answered = loaded.model.generate(
        input_ids=asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        streamer=_Shown(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return answered[0, len(ids) :].tolist()


class _Shown(TextStreamer):
    """Words as they come; a control character is shown, and is no order to the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False):
        print(shown(text), end="\n" if stream_end else "", flush=True)
