"""What `zero-recipes import` reads: the files of axolotl and LLaMA-Factory as typed models.

The structured keys stand here. Every other key of a table in config/imports has the type of the recipe's key that it
becomes. Numbers may be written as text, as both programs allow. A key of another type is refused by its name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from zero_recipes.config.keys import UNTYPED, accepted_types, key_types
from zero_recipes.core.files import package_yaml
from zero_recipes.core.findings import Finding, Refusal, finding


def _no_switch(value: Any) -> Any:
    """pydantic takes `true` for 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a switch")
    return value


def _strategy(value: Any) -> Any:
    """YAML's bare `no` is False."""
    return "no" if value is False else value


Whole = Annotated[int, BeforeValidator(_no_switch)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_switch)]
Strategy = Annotated[str, BeforeValidator(_strategy)]
Scalar = bool | Whole | Number | str
PYTHON_TYPES = {
    "string": str,
    "integer": Whole,
    "number": Whole | Number,
    "boolean": bool,
    "array": list,
    "object": dict[str, Any],
    "null": None,
    "any": Any,
}


def table(name: str) -> dict[str, Any]:
    """Read a file of config/imports, which map another trainer's keys."""
    return package_yaml("zero_recipes.config", f"imports/{name}.yaml")


class Theirs(BaseModel):
    """A mapping of another trainer: keys without a field are kept as they are."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True, protected_namespaces=())

    def keys_set(self) -> dict[str, Any]:
        """All keys that the file sets, those without a field among them, with their values."""
        values = vars(self) | (self.model_extra or {})
        return {key: value for key, value in values.items() if key in self.model_fields_set and value is not None}


class AxolotlFormat(Theirs):
    """A `type` that is a mapping: texts around an instruction. The defaults are axolotl's."""

    system_prompt: str = ""
    system_format: str = "{system}"
    format: str = "{instruction} {input} "
    no_input_format: str = "{instruction} "
    field_system: str | None = None
    field_instruction: str | None = None
    field_input: str | None = None
    field_output: str | None = None


class AxolotlDataset(Theirs):
    """An entry of `datasets`."""

    path: str | None = None
    name: str | None = None
    split: str | None = None
    train_on_split: str | None = None  # an older name of `split`
    data_files: str | list[str] | None = None
    type: str | AxolotlFormat | None = None
    field: str | None = None
    field_messages: str | None = None
    field_tools: str | None = None
    chat_template: str | None = None
    conversation: str | None = None  # the template of the older `type: sharegpt`
    message_property_mappings: dict[str, str] | None = None
    message_field_role: str | None = None
    message_field_content: str | None = None
    roles: dict[str, list[str] | str] | None = None


class Axolotl(Theirs):
    """The structured keys of axolotl's file."""

    base_model: str | None = None
    datasets: list[AxolotlDataset] | None = None
    val_set_size: Number | None = None
    num_epochs: Number | None = None
    evals_per_epoch: Number | None = None
    eval_steps: Number | None = None
    eval_strategy: Strategy | None = None
    optim_args: str | dict[str, Scalar] | None = None
    saves_per_epoch: Number | None = None
    save_steps: Number | None = None
    save_strategy: Strategy | None = None
    train_on_inputs: bool | None = None
    chat_template: str | None = None
    load_in_8bit: bool | None = None
    deepspeed: str | dict[str, Any] | None = None
    fsdp: bool | str | list[str] | None = None


class FactoryDataset(Theirs):
    """An entry of dataset_info.json."""

    file_name: str | None = None
    hf_hub_url: str | None = None
    subset: str | None = None
    split: str | None = None
    formatting: str = "alpaca"
    columns: dict[str, str | None] | None = None
    tags: dict[str, str | None] | None = None


class Factory(Theirs):
    """The structured keys of LLaMA-Factory's file."""

    stage: str | None = None
    finetuning_type: str | None = None
    template: str | None = None
    lora_target: str | list[str] | None = None
    oft_target: str | list[str] | None = None
    lora_rank: Whole | None = None
    loraplus_lr_ratio: Number | None = None
    dataset: str | list[str] | None = None
    dataset_dir: str | dict[str, Any] | None = None
    max_samples: Whole | None = None
    enable_thinking: bool | None = None
    deepspeed: str | dict[str, Any] | None = None
    fsdp: bool | str | list[str] | None = None
    load_in_8bit: bool | None = None


MODELS = {"axolotl": Axolotl, "LLaMA-Factory": Factory}


def typed(source: str, theirs: Mapping[str, Any], path: Path) -> Theirs:
    """Read the file's keys with their types. Raises Refusal, with one finding a key.

    `theirs`: flat, a block's key is "block.key".
    """
    for block in table(source)["nested"]:  # one that is a mapping is flat here
        if theirs.get(block) is not None:
            raise Refusal([_wrong_type(block, "Input should be a mapping", path, source)])
    return validated(_model(source), theirs, path, source)


@cache
def _model(source: str) -> type[Theirs]:
    """The structured keys, those of the table, and those that mean the same in a recipe."""
    base = MODELS[source]
    types = key_types()
    fields: dict[str, Any] = {key: (_recipe_type(key, types), None) for key in sorted(same_keys(source))}
    for key, row in table(source)["keys"].items():
        if "*" not in key:
            fields[key] = (_type_of_row(row, types), None)
    own = base.model_fields.keys() | table(source)["nested"]
    return create_model(source, __base__=base, **{key: kind for key, kind in fields.items() if key not in own})


def validated(model: type[Theirs], values: Any, path: Path, source: str, within: str = "") -> Any:
    """Make an object of the model. Raises Refusal, with one finding a key. `within`: the key that holds the values."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = {}
        for one in error.errors(include_url=False):
            names = [name for name in (within, _place(values, one["loc"])) if name]
            key = ".".join(names)
            found.setdefault(key, _wrong_type(key, one["msg"], path, source))
    raise Refusal(list(found.values()))


def _wrong_type(key: str, message: str, path: Path, source: str) -> Finding:
    return finding("ZR822", key=key, file=path, source=source, message=message)


@cache
def same_keys(source: str) -> set[str]:
    """Name the keys that are not in the trainer's table and mean the same in a recipe."""
    if source != "LLaMA-Factory":  # of axolotl's keys none is transformers' by itself: its table lists them
        return set()
    from transformers import TrainingArguments

    return {field.name for field in dataclasses.fields(TrainingArguments) if field.init} & key_types().keys()


def _type_of_row(row: str | Mapping[str, Any], types: Mapping[str, Any]) -> Any:
    """`row`: of a table in config/imports."""
    if isinstance(row, str):
        return _recipe_type(row, types)
    if row.get("number"):
        return Number | None
    if row.get("list"):
        return str | list[str] | None
    if row.keys() & {"values", "only"}:
        return Scalar | list[Scalar] | None
    if "to" in row:
        return _recipe_type(row["to"], types)
    if "within" in row:
        return Scalar | None
    return Any


def _recipe_type(key: str, types: Mapping[str, Any]) -> Any:
    """What a recipe's key takes, without the enumerations that a recipe writes as text."""
    if key in UNTYPED or key not in types:
        return Any
    kind = None
    for name in sorted(accepted_types(types[key])):
        kind = PYTHON_TYPES[name] if kind is None else kind | PYTHON_TYPES[name]
    return Any if kind is None else kind | None


def _place(values: Any, where: Sequence[str | int]) -> str:
    """ "datasets.0.path" of pydantic's `loc`, without the names of a union's members."""
    names = []
    for part in where:
        is_of_list = isinstance(values, list) and isinstance(part, int)
        if is_of_list or (isinstance(values, Mapping) and part in values):
            values = values[part]
            names.append(str(part))
    return ".".join(names)
