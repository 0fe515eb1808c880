"""`zero-recipes ask`: a saved model beside its base, on the same prompts."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import datasets
import torch
import transformers
from accelerate.utils.memory import clear_device_cache
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from zero_recipes.checkpoint.save import ADAPTER, INDEX, SINGLE, NotWhole, entries_of
from zero_recipes.config import recipe as recipes
from zero_recipes.config.recipe import Recipe, Settings, choose_device
from zero_recipes.core.findings import first_line, library_error_as_finding, refusal
from zero_recipes.core.process import environment_kept
from zero_recipes.data.load import PADDING_TOKENS
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.model import load_config, load_model
from zero_recipes.tools.verify import TOKENIZER, verify
from zero_recipes.training import answers as sampling

RECIPE, SAMPLES = "recipe.resolved.yaml", "samples.jsonl"
NO_BASE = "none"  # --base none: the model alone
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}
# keys of a recipe about its training: the process group, DeepSpeed, FSDP, the device
_ONE_PROCESS = dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"))
_ONE_PROCESS |= {"use_cpu": True, "tf32": None, "resume_from_checkpoint": None, "report_to": "none"}
_ONE_PROCESS |= dict.fromkeys(("bf16", "fp16", "torch_compile", "use_liger_kernel", "packing", "padding_free"), False)
_ONE_PROCESS |= dict.fromkeys(("load_in_4bit", "load_in_8bit", "push_to_hub"), False)


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The verb. Returns the exit code; raises Refusal before any weight is loaded."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    device = choose_device(use_cpu=False)
    target = find_target(arguments.model, arguments.base, overrides, arguments.trust_remote_code)
    tokenizer = load_tokenizer(target)
    most = target.settings.sample_max_new_tokens
    samples = read_questions(target, tokenizer)
    out = _output_dir(arguments.output_dir, target)
    print(f"model: {target.folder}", f"base: {target.base or 'none (--base NAME)'}", sep="\n")
    print(f"{len(samples)} prompts, at most {most} new tokens, greedy, on {device}", flush=True)
    base, tuned = answers_of_both(target, tokenizer, device, samples, most)
    rows = sampling.sample_rows(samples, base, tuned, scores_of)
    for row in rows:
        for scores in (row.scores_before, row.scores_after):
            if scores.get("reference_loss") is not None:
                scores["perplexity"] = math.exp(min(scores["reference_loss"], 700.0))  # exp(710) is no number
    sampling.write_rows(out / SAMPLES, rows)
    sampling.show_samples(rows, "before: the base model, after: the saved model")
    print(f"written: {out / SAMPLES}")
    return 0


def _output_dir(requested: Path | None, target: "Target") -> Path:
    """Where samples.jsonl goes: the folder named, else output/ask-NAME. Raises Refusal where there is one."""
    folder = requested or Path("output") / f"ask-{target.folder.resolve().name}"
    if (folder / SAMPLES).exists():
        raise refusal("ZR793", requested=folder / SAMPLES)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    saved_dtype: str  # of most of its weights, as torch names it; "auto" for an unusual one

    @property
    def dtype(self) -> str:
        """Of the weights to load. DeepSpeed and FSDP turn an adapter's base into 16 bit; else the recipe says it."""
        if self.is_adapter and not self.is_ours:
            return "auto"
        return self.settings.dtype or "auto" if self.is_adapter and self.saved_dtype == "float32" else self.saved_dtype

    @property
    def autocast(self) -> str | None:
        """The dtype that the run computed in, where its weights are float32."""
        is_wide = self.is_ours and self.saved_dtype == "float32"
        return _COMPUTED_IN.get(self.recipe.settings.precision) if is_wide else None


class Loaded(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: str
    autocast: str | None
    adapter_off: bool = False  # the base of an adapter

    @contextmanager
    def ready(self) -> Iterator[None]:
        """As its run computed, and a base without its adapter."""
        autocast = torch.autocast(self.device, getattr(torch, self.autocast)) if self.autocast else nullcontext()
        with autocast, self.model.disable_adapter() if self.adapter_off else nullcontext():
            yield

    def answers(self, samples: list[Sample], most: int, batch: int) -> sampling.Answers:
        """Greedy answers and reference losses, `batch` prompts at a time as its run took them."""
        found = sampling.Answers([], [])
        with self.ready():
            for part in (samples[start : start + batch] for start in range(0, len(samples), batch)):
                found.texts += sampling.generate_texts(self.model, self.tokenizer, part, most, self.device)
                found.reference_losses += sampling.reference_losses(self.model, self.tokenizer, part, self.device)
        return found


def find_target(folder: Path, base: str | None, overrides: list[str], trust_remote_code: bool = False) -> Target:
    """The model in `folder`, whole, with its run's recipe where it has one. No weight is read. `base`: of the command
    line, `none` for no base. `overrides`: recipe keys of the command line. Code that a model brings runs only where
    `trust_remote_code` says so, whatever the recipe says. Raises Refusal."""
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
    try:
        verify(folder, trust_remote_code=trust_remote_code)
        entries = entries_of(folder)
    except NotWhole as error:
        raise refusal("ZR787", folder=folder, error=first_line(error)) from error
    elements: Counter[str] = Counter()
    for entry in entries.values():
        elements[entry.dtype] += entry.elements
    return Target(
        folder=folder,
        is_adapter=is_adapter,
        base=name,
        recipe=recipe,
        settings=settings,
        is_ours=is_ours,
        draws_base=is_ours and base is None and recipe.settings.random_weights,
        saved_dtype=_DTYPES.get(elements.most_common(1)[0][0], "auto"),
    )


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[Recipe, bool]:
    """(the recipe, whether it is the run's own). What its `env:` sets is not kept: the file may be a stranger's."""
    above = [folder.resolve().parent] if folder.resolve().name.startswith("checkpoint-") else []
    path = next((place / RECIPE for place in (folder, *above) if (place / RECIPE).is_file()), None)
    if path is None:
        known = next(folder / name for name in ("adapter_config.json", "config.json") if (folder / name).is_file())
        return recipes.parse_recipe(known, {"model_name_or_path": str(folder)}, overrides), False
    with environment_kept():
        return recipes.parse_recipe(path, recipes.read_recipe_file(path), overrides), True


def load_tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, else the base's, whose tokens must be the same. Raises Refusal."""
    is_own = any((target.folder / name).is_file() for name in TOKENIZER)
    if not is_own and target.base is None:  # transformers would make one without a word
        raise refusal("ZR575", folder=target.folder)
    tokenizer = _read_tokenizer(str(target.folder) if is_own else target.base, target)
    known = tokenizer.get_vocab()
    if tokenizer.pad_token is None:  # masked, whatever it is
        tokenizer.pad_token = next((token for token in PADDING_TOKENS if token in known), tokenizer.eos_token)
    if is_own and target.base is not None and not target.is_adapter:
        base = _read_tokenizer(target.base, target).get_vocab()
        others = sorted(token for token, number in base.items() if known.get(token) != number)
        if others:
            raise refusal("ZR790", base=target.base, folder=target.folder, count=len(others), example=others[0])
    return tokenizer


def _read_tokenizer(place: str, target: Target) -> PreTrainedTokenizerBase:
    with library_error_as_finding(f"reading the tokenizer of {place}"):
        return AutoTokenizer.from_pretrained(place, trust_remote_code=target.settings.trust_remote_code)


def load(target: Target, tokenizer: PreTrainedTokenizerBase, device: str, of_base: bool = False) -> Loaded:
    """The model, an adapter on its base; `of_base`: the base of another, with a row for each of the model's tokens."""
    settings, name = target.settings, target.base if of_base or target.is_adapter else str(target.folder)
    ours = {"dtype", "torch_dtype", "device_map", "quantization_config"}
    keywords = {key: value for key, value in (settings.model_init_kwargs or {}).items() if key not in ours}
    values = settings.replace(
        model_name_or_path=name,
        model_revision=settings.model_revision if name == settings.model_name_or_path else "main",
        dtype=target.dtype,
        model_init_kwargs=keywords or None,
        random_weights=target.draws_base and name == target.base,
    )
    model = load_model(load_config(values), values)
    if of_base:
        wants_rows = len(tokenizer) > model.get_input_embeddings().weight.shape[0]
    else:  # TRL gives the base a row for each token where its chat template comes from another model
        shapes = [entry.shape for entry in entries_of(target.folder).values()]
        wants_rows = target.is_adapter and any(shape[:1] == (len(tokenizer),) for shape in shapes)
    if wants_rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if target.is_adapter and not of_base:
        from peft import PeftModel

        with library_error_as_finding(f"loading {target.folder} on its base model"):
            is_wide = target.saved_dtype == "float32"
            model = PeftModel.from_pretrained(model, str(target.folder), autocast_adapter_dtype=is_wide)
    return Loaded(model.to(device).eval(), tokenizer, device, target.autocast)


def read_questions(target: Target, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The prompts of `sample_prompts`, of the recipe or the command line, with the tokens of their references as a
    training row has them. Raises Refusal."""
    settings = target.settings
    requested = settings.sample_prompts
    args = recipes.trl_arguments(settings, target.recipe.path).training
    rows = rows_to_ask(requested, None, settings)
    samples = choose_samples(requested, rows, settings.dataset_format, tokenizer, settings.dataset_test_split)
    if not samples:
        raise refusal("ZR570", folder=target.folder)
    return with_tokens(samples, tokenizer, args)


def answers_of_both(
    target: Target, tokenizer: PreTrainedTokenizerBase, device: str, samples: list[Sample], most: int
) -> tuple[sampling.Answers | None, sampling.Answers]:
    """Of the base (None without one; an adapter's is the model with it off) and of the model."""
    batch = target.settings.per_device_eval_batch_size
    base = None
    if target.base is not None and not target.is_adapter:
        base = load(target, tokenizer, device, of_base=True).answers(samples, most, batch)
        clear_device_cache(garbage_collection=True)
    tuned = load(target, tokenizer, device)
    sampling.print_prompts_cut(tuned.model, tokenizer, samples, most)
    if target.is_adapter:
        base = tuned._replace(adapter_off=True).answers(samples, most, batch)
    return base, tuned.answers(samples, most, batch)


def scores_of(answer: str, reference: str) -> dict[str, float]:
    """`text_scores`, and ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) as F1, by rouge_score with Porter's stemmer; it
    reads a-z and digits."""
    from rouge_score import rouge_scorer

    kinds = ["rouge1", "rouge2", "rougeL"]
    scores = rouge_scorer.RougeScorer(kinds, use_stemmer=True).score(reference, answer)
    return sampling.text_scores(answer, reference) | {kind: float(scores[kind].fmeasure) for kind in kinds}
