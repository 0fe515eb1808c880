"""Read a recipe: a TRL YAML plus a few keys of our own, merged with the command line. It is read once.

`read_recipe_file` needs only PyYAML, for the recipe's `env:` has to be in force before torch is imported.
`parse_recipe` needs TRL.
"""

import copy
import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import yaml

from zero_recipes.config import keys
from zero_recipes.core.files import write_text
from zero_recipes.core.findings import library_error_as_finding, refusal
from zero_recipes.core.host import ALLOCATOR, set_allocator


class Settings(SimpleNamespace):
    """Every key of TRL's dataclasses and of ours, by its own name. Nothing writes into it. A value has the type that
    TRL's parser gives it. A key that does not exist raises AttributeError."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(**values)

    def replace(self, **changes: Any) -> Self:
        return Settings(vars(self) | changes)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32"."""
        return precision_of(self)

    @property
    def optimizer_name(self) -> str:
        """`optim`, which may be a member of transformers' OptimizerNames, as text."""
        return str(getattr(self.optim, "value", self.optim))

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates while it trains; YAML's bare `no` is False."""
        return self.eval_strategy not in ("no", False, None)

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        if self.activation_checkpointing is None:
            return bool(self.gradient_checkpointing)  # transformers' old name
        return bool(self.activation_checkpointing)

    @property
    def clones_tokenizer(self) -> bool:
        """Whether chat_template_path is another tokenizer, whose tokens TRL adds to the model."""
        path = self.chat_template_path
        return path is not None and not path.endswith((".jinja", ".j2"))

    @property
    def streams(self) -> bool:
        """Whether rows are read as they are trained on."""
        return self.streaming if self.datasets else self.dataset_streaming

    @property
    def saves_checkpoints(self) -> bool:
        """YAML's bare `no` is False."""
        return self.save_strategy not in ("no", False)

    @property
    def joined_by(self) -> str | None:
        """The key that puts several rows into one sequence: "packing", "padding_free" or None."""
        if self.packing:
            return "packing"
        if self.padding_free:
            return "padding_free"
        return None


def precision_of(arguments: Any) -> str:
    """ "bf16", "fp16" or "fp32" of anything with those attributes: TRL takes bf16 where neither is named."""
    if arguments.bf16 or (arguments.bf16 is None and not arguments.fp16):
        return "bf16"
    return "fp16" if arguments.fp16 else "fp32"


def computed_in(precision: str, dtype: Any) -> str:
    """ "bf16", "fp16" or "fp32", in which weights of `dtype` compute: without mixed precision in their own."""
    if precision != "fp32":
        return precision
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."), "fp32")


def loaded_dtype(settings: Settings, saved: Any) -> str:
    """ "float32": of the weights as they are loaded. `saved`: of the checkpoint's, None where it names none."""
    requested = (settings.model_init_kwargs or {}).get("dtype") or settings.dtype
    if requested in ("auto", None):
        requested = saved or "float32"
    return str(requested).removeprefix("torch.")


class RecipeFile(dict):
    """A recipe's mapping, without its `env:` block."""

    lines: dict[str, int]  # of each key
    environment: dict[str, str]  # to be set before torch is imported: `env:`, and torch's allocators


@library_error_as_finding("reading the recipe")
def read_recipe_file(path: Path) -> RecipeFile:
    """Reads, and sets nothing. Raises Refusal."""
    if not path.is_file():
        names = [recipe.name for recipe in path.parent.glob("*.yaml") if recipe.is_file()]
        near = difflib.get_close_matches(path.name, names, 1, 0.5)
        fix = "Check the path; the recipes are in recipes/."
        if near:
            fix = f"Did you mean {path.parent / near[0]}?"
        if path.is_dir():
            fix = "It is a folder. Name a file in it."
        raise refusal("ZR116", path=path, cwd=Path.cwd(), fix=fix)
    mapping = _load(path)
    env = mapping.pop("env", None) or {}
    if not isinstance(env, dict) or any(value is None or isinstance(value, (dict, list)) for value in env.values()):
        raise refusal("ZR119", path=path)
    mapping.environment = {str(name): str(value) for name, value in env.items()}
    in_force = os.environ | mapping.environment
    set_allocator(in_force)
    mapping.environment |= {name: in_force[name] for name in ALLOCATOR if name in in_force}
    return mapping


def recipe_in_force(path: Path) -> RecipeFile:
    """`read_recipe_file`, its environment set in this process. Raises Refusal."""
    mapping = read_recipe_file(path)
    os.environ.update(mapping.environment)
    return mapping


class _Loader(yaml.SafeLoader):
    """PyYAML's, with an error for a key that occurs twice in one mapping. ruamel.yaml has that, but it reads 1e-5 as a
    number: a recipe must mean what TRL's PyYAML makes of it."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise refusal("ZR126", key=key.value, path=self.name, first=lines[key.tag, key.value], line=line)
            lines[key.tag, key.value] = line
        return node


def _load(path: Path) -> RecipeFile:
    """Raises Refusal for a file that is no mapping of names, or has a key twice."""
    with path.open("rb") as stream:  # errors then name the file, and a wrong encoding is one of them
        loader = _Loader(stream)
        node = loader.get_single_node()
        names = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
        if not isinstance(node, yaml.MappingNode) or not {key.tag for key, _ in node.value} <= names:
            raise refusal("ZR118", path=path)
        mapping = RecipeFile(loader.construct_document(node))
    mapping.lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    return mapping


@dataclass(frozen=True)
class Recipe:
    """One recipe with its overrides, as the file and the command line say it. Nothing writes into it."""

    path: Path
    settings: Settings  # every known key, defaults included
    explicit: Mapping[str, Any]  # only the keys that the file or the command line names
    sha256: str  # of the file's bytes

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def output_dir(self) -> Path:
        """TRL would write into `trainer_output` for every recipe."""
        return Path(self.settings.output_dir or f"output/{self.name}")


def derive_accumulation(settings: Settings, explicit: Mapping[str, Any], world_size: int) -> int | None:
    """gradient_accumulation_steps from global_batch_size (sequences per optimizer step); None without that key.
    `world_size`: processes with rows of their own. Raises Refusal."""
    total = settings.global_batch_size
    if total is None:
        return None
    micro = settings.per_device_train_batch_size
    per_pass = world_size * micro
    if total <= 0 or total % per_pass:
        fitting = {per_pass * max(1, total // per_pass), per_pass * (max(0, total // per_pass) + 1)}
        near = " or ".join(map(str, sorted(fitting)))
        raise refusal("ZR121", total=total, world_size=world_size, micro=micro, near=near)
    derived = total // per_pass
    requested = explicit.get("gradient_accumulation_steps")
    if requested is not None and requested != derived:
        raise refusal("ZR122", total=total, requested=requested, world_size=world_size, micro=micro, derived=derived)
    return derived


class TrlArguments(NamedTuple):
    """TRL's own objects, for TRL's own functions; our code reads the settings."""

    script: Any  # ScriptArguments
    training: Any  # SFTConfig
    model: Any  # ModelConfig
    mixture: Any  # DatasetMixtureConfig


WITHOUT_LAUNCH = keys.tables()["without_launch"]


def trl_arguments(settings: Settings, path: Path) -> TrlArguments:
    """With the values in force. SFTConfig starts the process group. Raises Refusal."""
    objects = []
    for cls in keys.dataclasses_of_a_recipe()[:-1]:
        fields = [f.name for f in dataclasses.fields(cls) if f.init]
        with library_error_as_finding(f"making TRL's {cls.__name__} of {path}", fields):
            values = copy.deepcopy({key: value for key, value in settings.as_dict().items() if key in fields})
            for entry in values.get("datasets") or ():  # a mapping of columns is ours
                columns = entry.pop("columns", None)
                entry["columns"] = columns if isinstance(columns, list) else None
                for key in keys.ENTRY_KEYS:
                    entry.pop(key, None)
            objects.append(cls(**values))  # copied: DatasetMixtureConfig turns the mapping's entries into objects
    return TrlArguments(*objects)


def without_tokens(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's keys as they may be written: a token that opens the hub stays with who gave it."""
    kept = {key: value for key, value in keys.items() if key != "hub_token"}
    of_model = kept.get("model_init_kwargs")
    if isinstance(of_model, Mapping) and "token" in of_model:
        kept["model_init_kwargs"] = {key: value for key, value in of_model.items() if key != "token"}
    return kept


def write_resolved(
    explicit: Mapping[str, Any], path: Path, header: list[str], ds_config: dict[str, Any] | None
) -> None:
    """What was in force, as a recipe that runs again: the explicit and derived keys, the launch as a comment.
    `explicit`: of a Run. `ds_config`: the DeepSpeed configuration without "auto"; None without DeepSpeed."""
    if "hub_token" in explicit:
        header = [*header, "hub_token is not written: to run this again, set HF_TOKEN"]
    explicit = without_tokens(explicit)
    if ds_config is not None:
        explicit["deepspeed"] = ds_config
    plain = json.loads(json.dumps(explicit, default=str))  # PyYAML writes no members of an enumeration (`debug`)
    text = "".join(f"# {line}\n" for line in header) + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    write_text(path, text)


def steps_by_epochs(rows: int, settings: Settings, replicas: int) -> int:
    """Optimizer steps of a run by epochs (transformers 5.23 trainer.py, `set_initial_training_values`)."""
    micro = settings.per_device_train_batch_size
    batches = math.ceil(math.ceil(rows / micro) / replicas)
    if settings.dataloader_drop_last:
        batches = rows // micro // replicas
    steps = math.ceil(batches / settings.gradient_accumulation_steps)
    return math.ceil(settings.num_train_epochs * max(steps, 1))


@dataclass(frozen=True)
class RowLengths:
    """`lengths`: tokens of rows as they are trained on, truncated. `sequences`: how many a micro batch counts them as:
    so many as they are, or fewer where they are packed. `epoch`: sequences of the whole data; None where not known."""

    lengths: tuple[float, ...]
    sequences: float
    epoch: int | None
    source: str  # where they are from, in words
    evaluated: tuple[int, int] | None = None  # tokens of the longest, and with loss in one batch at most

    @property
    def mean(self) -> float:
        """Tokens of a row."""
        return sum(self.lengths) / len(self.lengths)


def stated(mean: float, settings: Settings) -> RowLengths:
    """Rows that all have so many tokens, and that fill their packs. Raises Refusal where max_length is less."""
    longest = settings.max_length
    if longest is not None and mean > longest:
        raise refusal("ZR841", mean=mean, longest=longest)
    sequences = 1.0
    if settings.packing and longest:
        sequences = mean / longest
    return RowLengths((mean,), sequences, None, f"--mean_tokens {mean:g}, the same for all rows")
