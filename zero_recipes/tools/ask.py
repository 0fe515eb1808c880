"""`zero-recipes ask`: a saved model beside its base, on the same prompts."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import transformers
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.trainer_utils import align_special_tokens

from zero_recipes.checkpoint.saved_model import ADAPTER, INDEX, SINGLE, NotWhole, entries_of
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import quiet
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.run import choose_device
from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import ONE_PROCESS, trl_arguments
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.core.folder_lock import held
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.data.audit import RowKeys
from zero_recipes.data.load import PADDING_TOKENS, read_tokenizer
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.engine.speed.cpu_products import multiply_in_fp32
from zero_recipes.engine.speed.cudnn_plans import allow_cudnn
from zero_recipes.metrics.scores import load_metrics
from zero_recipes.model.config import load_config
from zero_recipes.model.load import load_model
from zero_recipes.tools.verify import has_tokenizer, verify
from zero_recipes.training import answers as sampling

RECIPE = "recipe.resolved.yaml"
SAMPLES = "samples.jsonl"
ADAPTER_CONFIG = "adapter_config.json"
NO_BASE = "none"  # --base none: the model alone
QUANTIZED = ("load_in_4bit", "load_in_8bit")


def ask(arguments: argparse.Namespace) -> int:
    """Answer the same prompts with a saved model and its base, and write both. Returns the exit code.

    Raises Refusal before any weight is loaded.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    device = choose_device(use_cpu=False)
    if device == "cpu":
        multiply_in_fp32()  # as its run did
    target = find_target(arguments.model, arguments.base, arguments.overrides, arguments.trust_remote_code)
    allow_cudnn(device, target.settings.cudnn_attention)
    tokenizer = load_tokenizer(target)
    samples = read_questions(target, tokenizer)
    metrics = load_metrics(target.settings)
    folder = arguments.output_dir or Path("output") / f"ask-{target.folder.resolve().name}"
    written = folder / SAMPLES
    with held(folder, "ask"):
        if written.exists():
            raise refusal("ZR793", requested=written)
        print(f"model: {target.folder}")
        print(f"base: {target.base or 'none (--base NAME)'}")
        most = target.settings.sample_max_new_tokens
        print(f"{len(samples)} prompts, at most {most} new tokens, greedy, on {device}", flush=True)
        base, tuned = answers_of_both(target, tokenizer, device, samples)
        rows = sampling.sample_rows(samples, base, tuned, metrics)
        sampling.write_rows(written, rows)
        sampling.show_samples(rows, "before: the base model, after: the saved model")
        print(f"written: {written}")
    return 0


@dataclass(frozen=True)
class Target:
    """A saved model before loading."""

    folder: Path
    is_adapter: bool
    base: str | None  # None: the model answers alone
    recipe: Recipe  # the run's own, or TRL's defaults
    settings: Settings  # of one process

    @property
    def is_quantized(self) -> bool:
        """Whether an adapter was trained on weights in 4 or 8 bits."""
        return self.is_adapter and any(getattr(self.settings, key) for key in QUANTIZED)


def find_target(folder: Path, base: str | None, overrides: list[str], trust_remote_code: bool = False) -> Target:
    """Check the model in `folder` and find its run's recipe. No weight is read.

    `trust_remote_code` outranks the recipe's.
    Raises Refusal.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    weights = [ADAPTER] if is_adapter else [SINGLE, INDEX]
    if not any((folder / name).is_file() for name in weights):
        raise refusal("ZR784", folder=folder, weights=" nor ".join(weights), cwd=Path.cwd())
    try:
        verify(folder, trust_remote_code=trust_remote_code, records=False)
    except NotWhole as error:
        raise refusal("ZR787", folder=folder, error=first_line(error)) from error
    recipe, is_ours = _recipe_of(folder, overrides, is_adapter)
    of_one_process = ONE_PROCESS | {"trust_remote_code": trust_remote_code}
    if is_adapter:  # it was trained on these weights
        of_one_process |= {key: getattr(recipe.settings, key) for key in QUANTIZED}
    settings = recipe.settings.replace(**of_one_process)
    name = base
    if base == NO_BASE:
        name = None
    elif base is None and is_ours:
        name = settings.model_name_or_path
    elif base is None and is_adapter:
        name = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if is_adapter and name is None:
        raise refusal("ZR788", folder=folder)
    return Target(folder, is_adapter, name, recipe, settings)


def _recipe_of(folder: Path, overrides: list[str], is_adapter: bool) -> tuple[Recipe, bool]:
    """(recipe, whether it is the run's own). Its `env:` is not set: the file may be a stranger's."""
    path = folder / RECIPE
    whole = folder.resolve()
    if not path.is_file() and whole.name.startswith("checkpoint-"):
        path = whole.parent / RECIPE
    if path.is_file():
        return parse_recipe(path, recipes.read_recipe_file(path), overrides), True
    known = ADAPTER_CONFIG if is_adapter else "config.json"
    mapping = {"model_name_or_path": str(folder), "dtype": "auto"}
    return parse_recipe(folder / known, mapping, overrides), False


def load_tokenizer(target: Target) -> Tokenizer:
    """Load the model's tokenizer, else its base's. Raises Refusal if their tokens differ."""
    is_own = has_tokenizer(target.folder)
    place = str(target.folder) if is_own else target.base
    if place is None:  # transformers would make one without a word
        raise refusal("ZR575", folder=target.folder)
    tokenizer = read_tokenizer(place, target.settings)
    known = tokenizer.get_vocab()
    if tokenizer.pad_token is None:  # masked, whatever it is
        tokenizer.pad_token = next((token for token in PADDING_TOKENS if token in known), tokenizer.eos_token)
    if is_own and target.base is not None and not target.is_adapter:
        vocabulary = read_tokenizer(target.base, target.settings).get_vocab()
        others = sorted(token for token, number in vocabulary.items() if known.get(token) != number)
        if others:
            raise refusal("ZR790", base=target.base, folder=target.folder, count=len(others), example=others[0])
    return tokenizer


def load(
    target: Target, tokenizer: Tokenizer, device: str, base_in: str | None = None, merge_into: str | None = None
) -> PreTrainedModel:
    """Load the model as it is saved, or its base in the dtype `base_in`, with a row for each of the model's tokens.

    An adapter's base has the dtype of the recipe, and is quantized as in training.
    `merge_into`: instead of quantized weights, "dequantized": what they stand for; "base": those that were quantized.
    """
    settings = target.settings
    name = target.base if base_in or target.is_adapter else str(target.folder)
    keywords = dict(settings.model_init_kwargs or {})
    for key in ("dtype", "torch_dtype", "device_map", "quantization_config"):
        keywords.pop(key, None)
    is_quantized = target.is_quantized and merge_into != "base"
    if is_quantized:
        keywords["device_map"] = {"": device}  # it stays where it is loaded
    else:
        settings = settings.replace(**dict.fromkeys(QUANTIZED, False))
    settings = settings.replace(model_init_kwargs=keywords or None)
    if name != settings.model_name_or_path:  # not what the run began with
        other = {"model_name_or_path": name, "model_revision": "main", "random_weights": False}
        if not is_quantized or settings.dtype is None:
            other["dtype"] = "auto"
        settings = settings.replace(**other)
    if base_in:
        settings = settings.replace(dtype=base_in)
    model = load_model(load_config(settings), settings)
    if is_quantized and merge_into == "dequantized":
        model = model.dequantize()
        is_quantized = False
    grows = False
    if base_in:
        grows = len(tokenizer) > model.get_input_embeddings().weight.shape[0]
    elif target.is_adapter:
        # TRL gives the base a row for each token where its chat template comes from another model
        grows = any(entry.shape[:1] == (len(tokenizer),) for entry in entries_of(target.folder).values())
    if grows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if target.is_adapter:
        from peft import PeftModel

        with library_error_as_finding(f"loading {target.folder} on its base model"):
            model = PeftModel.from_pretrained(model, str(target.folder))
    return model.eval() if is_quantized else model.to(device).eval()


def read_questions(target: Target, tokenizer: Tokenizer) -> list[Sample]:
    """Read the prompts of `sample_prompts`, references tokenized as in training. Raises Refusal."""
    settings = target.settings
    training_args = trl_arguments(settings, target.recipe.path).training
    prompts = settings.sample_prompts
    rows = rows_to_ask(prompts, None, settings)
    split = settings.dataset_test_split
    ours = RowKeys.of(settings)
    samples = choose_samples(prompts, rows, settings.dataset_format, tokenizer, split, ours)
    if not samples:
        raise refusal("ZR570", folder=target.folder)
    return with_tokens(samples, tokenizer, training_args, ours)


def answers_of_both(
    target: Target, tokenizer: Tokenizer, device: str, samples: list[Sample]
) -> tuple[sampling.Answers | None, sampling.Answers]:
    """Generate the base's answers, or None, and the model's. An adapter's base is the model with it off.

    Both end at the tokenizer's end token, as in training. An adapter is saved without a generation_config.json, and its
    base knows its own end token only.
    """
    model = load(target, tokenizer, device)
    align_ends(model, tokenizer)
    sampling.print_prompts_cut(model, tokenizer, samples, target.settings.sample_max_new_tokens)
    tuned = _answers(target, model, tokenizer, samples)
    base = None
    if target.is_adapter:
        with model.disable_adapter():
            base = _answers(target, model, tokenizer, samples)
    elif target.base is not None:
        dtype = str(model.dtype).removeprefix("torch.")
        del model
        clear_device_cache(garbage_collection=True)  # a GPU need not hold both
        base_model = load(target, tokenizer, device, base_in=dtype)
        align_ends(base_model, tokenizer)
        base = _answers(target, base_model, tokenizer, samples)
    return base, tuned


def align_ends(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Tell a model which tokens begin, end and pad a text, as the Trainer does when it is made."""
    with quiet():  # it says so at length
        align_special_tokens(model, tokenizer)


def _answers(target: Target, model: PreTrainedModel, tokenizer: Tokenizer, samples: list[Sample]) -> sampling.Answers:
    device = model.device
    most = target.settings.sample_max_new_tokens
    batch = target.settings.per_device_eval_batch_size
    answers = sampling.Answers([], [])
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        answers.texts += sampling.generate_texts(model, tokenizer, part, most, device)
        answers.reference_losses += sampling.reference_losses(model, tokenizer, part, device)
    return answers
