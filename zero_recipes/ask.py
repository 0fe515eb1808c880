"""`zero-recipes ask`: a saved model beside its base, on the same prompts or in a conversation."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import datasets
import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from zero_recipes.checkpoint.save import (
    ADAPTER,
    INDEX,
    SINGLE,
    NotWhole,
    compare_with_adapter,
    embedding_rows,
    entries_of,
)
from zero_recipes.checkpoint.verify import TOKENIZER, verify
from zero_recipes.config import recipe as recipes
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.run import choose_device
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, library_error_as_finding, refusal
from zero_recipes.core.process import environment_kept
from zero_recipes.core.tables import Column, plain, print_columns, print_texts, shown, terminal
from zero_recipes.data.load import PADDING_TOKENS, alpaca_prompt, apply_chat_template_file
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.metrics.read_runs import SampleRow
from zero_recipes.metrics.schema import FILE, ContractError, Metrics
from zero_recipes.model import load_config, load_model
from zero_recipes.training.samples import (
    TEXT_SCORES,
    Answers,
    generate_texts,
    perplexity,
    places,
    prompts_cut,
    question,
    reference_losses,
    rouge,
    score,
    short,
    why_unscored,
    write_rows,
)

RECIPE = "recipe.resolved.yaml"
NO_BASE = "none"  # --base none: the model alone
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}
# keys of a recipe about its training: the process group, DeepSpeed, FSDP, the device
_ONE_PROCESS = {"deepspeed": None, "fsdp": None, "fsdp_config": None, "parallelism_config": None, "use_cpu": True}
_ONE_PROCESS |= {"bf16": False, "fp16": False, "tf32": None, "torch_compile": False, "use_liger_kernel": False}
_ONE_PROCESS |= {"accelerator_config": None, "resume_from_checkpoint": None, "report_to": "none", "packing": False}
_ONE_PROCESS |= {"load_in_4bit": False, "load_in_8bit": False, "push_to_hub": False, "padding_free": False}


@dataclass(frozen=True)
class Target:
    """A saved model, ready to be loaded."""

    folder: Path
    is_adapter: bool
    base: str | None  # None: the model answers alone
    recipe: Recipe  # the run's own, or TRL's defaults
    settings: Settings  # of one process
    is_ours: bool  # whether the recipe is the run's own
    draws_base: bool  # the run began with random weights, and so does the base
    dtype: str  # of the weights, as torch names it; "auto": as they are saved
    autocast: str | None  # the dtype that the run computed in, where its weights are float32
    adapter_dtype: str

    @property
    def name(self) -> str:
        """The folder's name, of a checkpoint with its run's."""
        return "-".join(dict.fromkeys((_run_folder(self.folder).name, self.folder.resolve().name)))


class Loaded(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str
    autocast: str | None
    adapter_off: bool = False

    def without_adapter(self) -> Loaded:
        """The base of an adapter."""
        return self._replace(adapter_off=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The context that its run computed in."""
        autocast = torch.autocast(self.device, getattr(torch, self.autocast)) if self.autocast else nullcontext()
        with autocast, self.model.disable_adapter() if self.adapter_off else nullcontext():
            yield


def find_target(folder: Path, base: str | None, overrides: list[str], trust_remote_code: bool = False) -> Target:
    """The model in `folder`, whole, with its run's recipe where it has one. No weight is read.

    `base`: of the command line, `none` for no base. `overrides`: recipe keys of the command line. Code that a model
    brings runs only where `trust_remote_code` says so, whatever the recipe says. Raises Refusal.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
    weights = (ADAPTER,) if is_adapter else (SINGLE, INDEX)
    if not any((folder / name).is_file() for name in weights):
        raise refusal("ZR784", folder=folder, weights=" nor ".join(weights), cwd=Path.cwd())
    recipe, is_ours = _recipe_of(folder, overrides)
    settings = recipe.settings.replace(**_ONE_PROCESS, trust_remote_code=trust_remote_code)
    name = None if base == NO_BASE else base
    if base is None and is_ours:
        name = settings.model_name_or_path
    elif base is None and is_adapter:
        name = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if is_adapter and name is None:
        raise refusal("ZR788", folder=folder)
    dtype = saved = _saved_dtype(folder, is_adapter, name, trust_remote_code)
    if is_adapter:  # DeepSpeed and FSDP turn base and adapter into 16 bit; else the recipe says the base's
        dtype = "auto" if not is_ours else saved if saved != "float32" else settings.dtype or "auto"
    return Target(
        folder=folder,
        is_adapter=is_adapter,
        base=name,
        recipe=recipe,
        settings=settings,
        is_ours=is_ours,
        draws_base=is_ours and base is None and recipe.settings.random_weights,
        dtype=dtype,
        autocast=_computed_in(folder, recipe) if is_ours and saved == "float32" else None,
        adapter_dtype=saved,
    )


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[Recipe, bool]:
    """(the recipe, whether it is the run's own). What its `env:` sets is not kept: the file may be a stranger's."""
    places = (folder / RECIPE, _run_folder(folder) / RECIPE)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = next(folder / name for name in ("adapter_config.json", "config.json") if (folder / name).is_file())
        return recipes.parse_recipe(known, {"model_name_or_path": str(folder)}, overrides), False
    with environment_kept():
        return recipes.parse_recipe(path, recipes.read_recipe_file(path), overrides), True


def _is_checkpoint(folder: Path) -> bool:
    return re.fullmatch(r"checkpoint-\d+", folder.resolve().name) is not None


def _run_folder(folder: Path) -> Path:
    """The folder of the run that saved a model there."""
    return folder.resolve().parent if _is_checkpoint(folder) else folder.resolve()


def _saved_dtype(folder: Path, is_adapter: bool, base: str | None, trust_remote_code: bool) -> str:
    """The dtype of most weights; "auto" for an unusual one. Raises Refusal where the model is not whole.

    Of a checkpoint no checksums: its manifest is over the optimizer's states too.
    """
    try:
        if is_adapter:
            compare_with_adapter(folder, entries_of(folder), trust_remote_code, base)
        else:
            verify(folder, skip_checksums=_is_checkpoint(folder), trust_remote_code=trust_remote_code)
    except NotWhole as error:
        raise refusal("ZR787", folder=folder, error=first_line(error)) from error
    sizes: Counter[str] = Counter()
    for entry in entries_of(folder).values():
        sizes[entry.dtype] += entry.elements
    return _DTYPES.get(sizes.most_common(1)[0][0], "auto")


def _computed_in(folder: Path, recipe: Recipe) -> str | None:
    """The dtype that the run computed in, where it is not float32."""
    precision = recipe.settings.precision
    with suppress(ContractError):
        precision = Metrics.read(_run_folder(folder) / FILE).precision or precision
    return _COMPUTED_IN.get(precision)


def load_tokenizer(target: Target, overrides: list[str]) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, else the base's, whose tokens must be the same. Raises Refusal."""
    is_own = any((target.folder / name).is_file() for name in TOKENIZER)
    if not is_own and target.base is None:
        raise refusal("ZR575", folder=target.folder)
    tokenizer = _read_tokenizer(str(target.folder) if is_own else target.base, target)
    if tokenizer.pad_token is None:  # masked, whatever it is
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PADDING_TOKENS if token in known), tokenizer.eos_token)
    if is_own and target.base is not None and not target.is_adapter:
        known = tokenizer.get_vocab()
        base = _read_tokenizer(target.base, target).get_vocab() if _has_tokenizer(target.base) else {}
        others = sorted(token for token, number in base.items() if known.get(token) != number)
        if others:
            raise refusal("ZR790", base=target.base, folder=target.folder, count=len(others), example=others[0])
    if any(word.startswith("--chat_template_path") for word in overrides):  # the recipe's own is saved with the model
        tokenizer = apply_chat_template_file(tokenizer, target.settings)
    return tokenizer


def _has_tokenizer(base: str) -> bool:
    return not Path(base).is_dir() or any((Path(base) / name).is_file() for name in TOKENIZER)


def _read_tokenizer(place: str, target: Target) -> PreTrainedTokenizerBase:
    with library_error_as_finding(f"reading the tokenizer of {place}"):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=target.settings.trust_remote_code)


def load_base(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The base in the dtype of the model, with as many rows of tokens as the model's tokenizer has."""
    model = _load(target, target.base)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        print(f"the base has {rows:,} rows for {len(tokenizer):,} tokens: it gets the others, untrained", flush=True)
        model.resize_token_embeddings(len(tokenizer))
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def load_tuned(target: Target, tokenizer: PreTrainedTokenizerBase, device: str) -> Loaded:
    """The model; an adapter on its base."""
    model = _load(target, target.base if target.is_adapter else str(target.folder))
    if target.is_adapter:
        from peft import PeftModel

        rows = embedding_rows(entries_of(target.folder), model)
        if rows is not None:
            model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has their weights
        with library_error_as_finding(f"putting {target.folder} on its base"):
            is_wide = target.adapter_dtype == "float32"
            model = PeftModel.from_pretrained(model, str(target.folder), autocast_adapter_dtype=is_wide)
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def _load(target: Target, name: str) -> PreTrainedModel:
    """The model of that folder or name, with the recipe's keys for it."""
    keywords = dict(target.settings.model_init_kwargs or {})
    for key in ("dtype", "torch_dtype", "device_map", "quantization_config"):
        keywords.pop(key, None)
    changes = {"model_name_or_path": name, "dtype": target.dtype, "model_init_kwargs": keywords or None}
    changes["random_weights"] = target.draws_base and name == target.base
    if name != target.settings.model_name_or_path:
        changes["model_revision"] = "main"
    values = target.settings.replace(**changes)
    return load_model(load_config(values), values)


SAMPLES = "samples.jsonl"
CHAT_TOKENS = 256  # of an answer in a conversation
SCORES = (*TEXT_SCORES, rouge)
LOWER_IS_BETTER = ("reference_loss", "perplexity")
SHOWN = 6  # prompts in the terminal
CHAT_COMMANDS = "/reset forgets the conversation, /exit (or Ctrl-D) ends it."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The verb. Returns the exit code; raises Refusal before any weight is loaded."""
    datasets.disable_progress_bars()  # of the checks: they take a moment
    transformers.utils.logging.disable_progress_bar()
    device = choose_device(use_cpu=False)
    target = find_target(arguments.model, arguments.base, overrides, arguments.trust_remote_code)
    tokenizer = load_tokenizer(target, overrides)
    if target.recipe.settings.load_in_4bit or target.recipe.settings.load_in_8bit:
        print("trained on a quantized base: the base has its own weights here")
    if arguments.chat:
        beside = arguments.base not in (None, NO_BASE)
        return _chat(target, tokenizer, device, beside, arguments.max_new_tokens or CHAT_TOKENS)
    out = _output_dir(arguments.output_dir, target)
    most = arguments.max_new_tokens or target.settings.sample_max_new_tokens
    samples = read_questions(target, arguments.prompts, tokenizer)
    console = terminal()
    console.print(plain(f"model: {target.folder}\nbase: {target.base or 'none (--base NAME)'}"), soft_wrap=True)
    console.print(plain(f"{len(samples)} prompts, at most {most} new tokens, greedy, on {device}"), soft_wrap=True)
    if sys.stderr.isatty():  # loading may take minutes
        transformers.utils.logging.enable_progress_bar()
    base, tuned = _answers(target, tokenizer, device, samples, most)
    rows = compare(samples, base, tuned)
    write_rows(out / SAMPLES, rows)
    tokens = [sum(label != -100 for label in sample.labels[1:]) for sample in samples]  # those that carry loss
    show(rows, means(rows, tokens), console)
    print(f"written: {out / SAMPLES}")
    return 0


def _output_dir(requested: Path | None, target: Target) -> Path:
    """Where samples.jsonl goes: the folder named, else the first of output/ask-NAME, ask-NAME-2, ... without one."""
    if requested is None:
        names = (f"ask-{target.name}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        return next(Path("output") / name for name in names if not os.path.lexists(Path("output") / name / SAMPLES))
    if os.path.lexists(requested / SAMPLES):
        raise refusal("ZR793", requested=requested / SAMPLES)
    requested.mkdir(parents=True, exist_ok=True)
    return requested


def read_questions(target: Target, prompts: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The prompts of the recipe, or of a file that is read as a recipe's `sample_prompts` is, with the tokens of their
    references as a training row has them. Raises Refusal."""
    requested, settings = target.settings.sample_prompts if prompts is None else _of_file(prompts), target.settings
    if not target.is_ours and "max_length" not in target.recipe.given:
        name = target.base if target.is_adapter else str(target.folder)
        config = load_config(settings.replace(model_name_or_path=name, model_revision="main"))
        settings = settings.replace(max_length=getattr(config.get_text_config(), "max_position_embeddings", None))
    args = recipes.trl_arguments(settings, target.recipe.path).training
    rows = rows_to_ask(requested, None, settings)
    samples = choose_samples(requested, rows, settings.dataset_format, tokenizer, settings.dataset_test_split)
    if not samples:
        raise refusal("ZR570", source=prompts or f"the recipe of {target.folder}")
    return with_tokens(samples, tokenizer, args)


def _of_file(path: Path) -> str | list[str]:
    """The path of JSON Lines, or the lines of a plain text: .txt, or a first line that is no JSON object."""
    if not path.is_file() or path.suffix == ".jsonl":
        return str(path)
    with library_error_as_finding(f"reading {path}"):
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return str(path) if path.suffix != ".txt" and lines and lines[0].lstrip().startswith("{") else lines


def _answers(
    target: Target, tokenizer: PreTrainedTokenizerBase, device: str, samples: list[Sample], most: int
) -> tuple[Answers | None, Answers]:
    """(the base's, the model's): one model in memory after the other, an adapter's base with the adapter off."""
    batch, base = target.settings.per_device_eval_batch_size, None
    if target.base is not None and not target.is_adapter:
        base = _answer(load_base(target, tokenizer, device), samples, most, batch)
        clear_device_cache(garbage_collection=True)
    loaded = load_tuned(target, tokenizer, device)
    if (cut := prompts_cut(loaded.model, tokenizer, samples, most)) is not None:
        print(cut, flush=True)
    if target.is_adapter:
        base = _answer(loaded.without_adapter(), samples, most, batch)
    return base, _answer(loaded, samples, most, batch)


def _answer(loaded: Loaded, samples: list[Sample], most: int, batch: int) -> Answers:
    """Greedy answers and reference losses of one model, `batch` prompts at a time as its run took them."""
    answers = Answers([], [])
    for part in (samples[start : start + batch] for start in range(0, len(samples), batch)):
        with loaded.computing():
            answers.texts += generate_texts(loaded.model, loaded.tokenizer, part, most, loaded.device)
            answers.reference_losses += reference_losses(loaded.model, loaded.tokenizer, part, loaded.device)
    return answers


def compare(samples: list[Sample], base: Answers | None, tuned: Answers) -> list[SampleRow]:
    """Rows of samples.jsonl: before is the base, None where the model answered alone."""
    before = [{}] * len(samples) if base is None else _scores(samples, base)
    rows = []
    for i, (sample, own, after) in enumerate(zip(samples, before, _scores(samples, tuned), strict=True)):
        losses = [side.reference_losses[i] for side in (base, tuned) if side is not None]
        row = {"prompt": sample.prompt, "reference": sample.reference, "unscored": why_unscored(sample, losses)}
        row |= {"before": None if base is None else base.texts[i], "after": tuned.texts[i]}
        rows.append(SampleRow(**row, scores_before=own, scores_after=after))
    return rows


def _scores(samples: list[Sample], answers: Answers) -> list[dict[str, float | None]]:
    scores = score(samples, answers, SCORES)
    for row in scores:
        if row.get("reference_loss") is not None and math.isfinite(perplexity(row["reference_loss"])):
            row["perplexity"] = perplexity(row["reference_loss"])
    return scores


def means(rows: Sequence[SampleRow], tokens: Sequence[int]) -> dict[str, tuple[float | None, float]]:
    """{score: (base, model)} over the rows that have it on every side; perplexity over all tokens of the references.

    `tokens`: of the reference of each row, those that carry loss.
    """
    alone = all(row.before is None for row in rows)
    found: dict[str, tuple[float | None, float]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.scores_after if name != "perplexity"):
        sides = [(row.scores_before.get(name), row.scores_after.get(name)) for row in rows]
        known = [i for i, (before, after) in enumerate(sides) if after is not None and (alone or before is not None)]
        if not known:
            continue
        values = [None if alone else [sides[i][0] for i in known], [sides[i][1] for i in known]]
        found[name] = tuple(None if side is None else fmean(side) for side in values)
        if name == "reference_loss":
            counts = [tokens[i] for i in known]
            found["perplexity"] = tuple(None if side is None else perplexity(fmean(side, counts)) for side in values)
    return found


def show(rows: list[SampleRow], scores: Mapping[str, tuple[float | None, float]], console: Console) -> None:
    """Print the first prompts with all answers, and the scores over all prompts."""
    alone = all(row.before is None for row in rows)
    cells = {"prompt": lambda row: question(row.prompt), "base": lambda row: short(row.before)}
    cells |= {"model": lambda row: short(row.after), "reference": lambda row: short(row.reference)}
    if alone:
        del cells["base"]
    if all(row.reference is None for row in rows):
        del cells["reference"]
    texts = [[cell(row) for cell in cells.values()] for row in rows[:SHOWN]]
    print_texts(f"Answers ({len(texts)} of {len(rows)} prompts)", list(cells), texts, console)
    if not scores:
        console.print(plain("No prompt has a reference: nothing is scored."))
        return
    columns = [] if alone else [Column("base", lambda line: f"{line[1][0]:.3f}")]
    columns += [Column("model", lambda line: f"{line[1][1]:.3f}")]
    columns += [Column("better", lambda line: "lower" if line[0] in LOWER_IS_BETTER else "higher")]
    print_columns([Column("score", lambda line: line[0])], columns, list(scores.items()), console)
    for why in dict.fromkeys(row.unscored for row in rows if row.unscored):
        count = sum(row.unscored == why for row in rows)
        console.print(plain(f"{count} of {len(rows)} rows have no reference_loss: {why}"))


# a conversation


class Wording(NamedTuple):
    """How a conversation becomes the text that a model goes on with."""

    described: str
    write: Callable[[list[dict[str, str]]], str]


def wording(tokenizer: PreTrainedTokenizerBase, dataset_format: str | None) -> Wording:
    """The chat template; without one the recipe's Alpaca wrapper; without either plain text. Raises Refusal."""
    if tokenizer.chat_template:

        def write(turns: list[dict[str, str]]) -> str:
            with library_error_as_finding("writing the conversation with the model's chat template"):
                return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

        write([{"role": "user", "content": "a"}])
        return Wording("The model's chat template writes the conversation.", write)
    if dataset_format == "alpaca":
        described = "No chat template: each message is an instruction in Alpaca's words, without earlier turns."
        return Wording(described, lambda turns: alpaca_prompt(turns[-1]["content"]))
    described = "No chat template and no dataset_format: the model goes on with the plain text of all turns."
    return Wording(described, lambda turns: "".join(turn["content"] for turn in turns))


def _chat(target: Target, tokenizer: PreTrainedTokenizerBase, device: str, beside: bool, most: int) -> int:
    """Until /exit, the end of the input or Ctrl-C. Answers are greedy and appear word by word."""
    words = wording(tokenizer, target.settings.dataset_format)
    models = {"model": load_tuned(target, tokenizer, device)}
    if beside:
        base = models["model"].without_adapter() if target.is_adapter else load_base(target, tokenizer, device)
        models = {"base": base} | models
    turns: dict[str, list[dict[str, str]]] = {name: [] for name in models}
    print(f"{words.described} {CHAT_COMMANDS}", flush=True)
    with suppress(EOFError, KeyboardInterrupt):
        while (text := input("\nyou> ").strip()) != "/exit":
            if text == "/reset":
                turns = {name: [] for name in models}
                print("(forgotten)", flush=True)
            elif text:
                for name, loaded in models.items():
                    turns[name].append({"role": "user", "content": text})
                    turns[name].append(_answer_turn(name, loaded, turns[name], words, most))
    print(flush=True)
    return 0


def _answer_turn(name: str, loaded: Loaded, turns: list[dict[str, str]], words: Wording, most: int) -> dict[str, str]:
    """The turn that answers the last one, printed as it comes. `most`: its tokens."""
    tokenizer, templated = loaded.tokenizer, bool(loaded.tokenizer.chat_template)
    room, most = places(loaded.model, most)
    ids = tokenizer(words.write(turns), add_special_tokens=not templated)["input_ids"]
    if len(ids) > room:
        print(f"(the last {room:,} tokens of the conversation: the model takes no more)", flush=True)
    print(f"{name}> ", end="", flush=True)
    prompt = torch.tensor([ids[-room:]], device=loaded.device)
    with torch.no_grad(), loaded.computing():
        answered = loaded.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            streamer=_Shown(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    content = tokenizer.decode(answered[0, prompt.shape[1] :], skip_special_tokens=True)
    return {"role": "assistant", "content": content.strip() if templated else content}


class _Shown(TextStreamer):
    """Words as they come; a control character is shown, and is no order to the terminal."""

    def on_finalized_text(self, text: str, stream_end: bool = False):
        print(shown(text), end="\n" if stream_end else "", flush=True)
