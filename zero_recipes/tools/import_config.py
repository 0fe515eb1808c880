"""`zero-recipes import FILE`: another trainer's file as a recipe.

Tables in config/imports map its keys and name its defaults.
What no table can say is code here.

Each key is carried, or named with what it means that the recipe lacks it: in a comment at its place, and where the
weights would differ also in the recipe's list `open_points`, which `check` and a run repeat.
"""

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config.ds_config import DsConfig, read_json_mapping
from zero_recipes.config.keys import FORMATS
from zero_recipes.core.files import package_yaml, write_text
from zero_recipes.core.findings import finding, raise_errors, refusal
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.tools import import_models
from zero_recipes.tools.import_models import table

# of a key without a counterpart: no effect on the run; what the run does not do; what the weights lack; no run at all
REMARKS = ("note", "loses", "changes", "refuses")
TITLES = {"note": "note", "loses": "not supported", "changes": "open point"}
LONGEST_VALUE = 80  # characters of another trainer's value in a remark


@dataclass
class Line:
    """A key of the recipe."""

    value: Any
    key: str | None  # of the other trainer, that it comes from; None for one of its defaults
    why: str


@dataclass
class Draft:
    """A recipe in the making, and what it lacks."""

    path: Path  # of the other trainer's file
    at: Path  # where the recipe will be
    source: str  # the other trainer
    theirs: dict[str, Any]  # its keys: "optimizer.lr" stands in the block `optimizer`
    order: list[str]  # its keys as they follow each other in the file, blocks as one
    recipe: dict[str, Line] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)  # beside the recipe
    # {kind of REMARKS: {the other trainer's key: what it means}}
    remarks: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in REMARKS})

    @property
    def open_points(self) -> dict[str, str]:
        """{the other trainer's key: what the recipe trains instead}."""
        return self.remarks["changes"]

    def put(self, key: str | None, why: str, **values: Any) -> None:
        """`key`: of the other trainer, where its file has it."""
        for name, value in values.items():
            if isinstance(value, dict) and name in self.recipe:
                value = self.recipe[name].value | value
            self.recipe[name] = Line(value, key, why)

    def value(self, name: str, default: Any = None) -> Any:
        """Of a recipe's key."""
        line = self.recipe.get(name)
        return default if line is None else line.value

    def remark(self, which: str, **values: Any) -> None:
        """Of effects.yaml. `values`: in its text."""
        row = {word: text.format(**values) for word, text in table("effects")[which].items()}
        self.add_remarks(row["key"], row)

    def add_remarks(self, key: str, row: Mapping[str, Any]) -> None:
        """`row`: of a table. A key may have several: one for each item of a list."""
        for kind in REMARKS:
            if kind in row:
                effects = self.remarks[kind].get(key, "").split("; ")
                if row[kind] not in effects:
                    effects.append(row[kind])
                self.remarks[kind][key] = "; ".join(filter(None, effects))

    def told(self) -> list[str]:
        """What is said of the keys that are not carried, one line a key."""
        return [line for _, line in self._remarks_by_place()]

    def _remarks_by_place(self) -> list[tuple[int, str]]:
        lines = []
        for kind, title in TITLES.items():
            for key, effect in self.remarks[kind].items():
                lines.append((self._place(key), f"{title}: {_one_line(key)}: {_one_line(effect)}"))
        return lines

    def _place(self, key: str | None) -> int:
        """Where the other trainer's file has the key; its defaults come last."""
        if key is None:
            return len(self.order) + 1
        for name in (key, key.partition(": ")[0], key.partition(".")[0]):
            if name in self.order:
                return self.order.index(name)
        return len(self.order)

    def text(self) -> str:
        """The recipe, its keys in the order of the other trainer's file, with the remarks where they belong."""
        blocks = [(place, [f"# {line}"]) for place, line in self._remarks_by_place()]
        for name, line in self.recipe.items():
            blocks.append((self._place(line.key), _yaml_lines(name, line.value, line.why)))
        blocks.sort(key=lambda block: block[0])
        lines = [f"# Written by zero-recipes import {_one_line(str(self.path))} ({self.source})."]
        for _, block in blocks:
            lines += block
        if self.open_points:
            points = [f"{_one_line(key)}: {_one_line(effect)}" for key, effect in self.open_points.items()]
            lines.append("# Repeated by check and by each run. Take out what you have settled.")
            lines += _yaml_lines("open_points", points, "open_points")
        return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    """For a comment: a line break in another trainer's key would begin a key of the recipe."""
    words = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(words.split())


def _yaml_lines(name: str, value: Any, why: str) -> list[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000)
    first, *rest = text.splitlines()
    if why != name:
        first = f"{first}  # {_one_line(why)}"
    return [first, *rest]


def import_(arguments: argparse.Namespace) -> int:
    recipe = arguments.output or Path(f"{arguments.file.stem}.recipe.yaml")
    with library_error_as_finding(f"importing {arguments.file}"):
        draft = translated(arguments.file, recipe)
        texts = {recipe: draft.text()} | draft.files
    refused = []
    for key, effect in draft.remarks["refuses"].items():
        refused.append(finding("ZR894", key=key, effect=effect, file=draft.path, source=draft.source))
    raise_errors(refused)
    print(*draft.told(), sep="\n")
    write_new(texts)
    print(f"zero-recipes check {recipe} --data")
    file = draft.value("accelerate_config")
    if file:
        print(f"zero-recipes train {recipe} --config_file {file}")
    return 0


def write_new(texts: Mapping[Path, str]) -> None:
    """Raises Refusal if a file exists."""
    for path in texts:
        if path.exists():
            raise refusal("ZR895", path=path)
    for path, text in texts.items():
        write_text(path, text)
        print(f"written: {path}")


def translated(path: Path, recipe: Path) -> Draft:
    """Translate another trainer's file into a draft. Raises Refusal for an unknown trainer, and for a wrong type."""
    source, theirs = _read(path)
    known = table(source)
    file = import_models.typed(source, _flat(theirs, known["nested"]), path)
    draft = Draft(path, recipe, source, file.keys_set(), list(theirs))
    draft.put(None, f"always in {source}", **known["always"])
    TRAINERS[source](draft, file)
    for key in known["keys"]:
        if "*" not in key:
            _translate(draft, key)
    same = import_models.same_keys(source)
    for key in sorted(draft.theirs.keys() - known["keys"]):
        if key in same and _pattern_row(draft, key) is None:
            draft.put(key, key, **{key: draft.theirs[key]})
        else:
            _translate(draft, key)

    if not draft.value("test_split_size"):
        _leave_out_evaluation(draft)
    if draft.value("load_best_model_at_end") and draft.value("eval_steps"):
        line = draft.recipe["eval_steps"]
        draft.put(line.key, "any evaluation may be the best", save_steps=line.value)
    names = draft.value("lora_target_modules", [])
    if len(names) > 1 and "all-linear" in names:  # PEFT knows it alone, and TRL has no adapter on the LM head
        draft.remark("all_linear_and_others", key=draft.recipe["lora_target_modules"].key or "lora_target_modules")
    optim_args = draft.value("optim_args")
    if isinstance(optim_args, dict):
        words = [f"{key}={value}" for key, value in optim_args.items()]
        draft.put("optim_args", "the optimizer's keys", optim_args=", ".join(words))
    if not draft.value("datasets") and not {"datasets", "dataset"} & draft.open_points.keys():
        draft.remark("no_data")
    return draft


def _leave_out_evaluation(draft: Draft) -> None:
    """Without evaluation rows nothing is evaluated, and no model is the best."""
    if draft.value("eval_strategy", "no") not in ("no", False):
        draft.remark("no_evaluation", key=draft.recipe["eval_strategy"].key or "eval_strategy")
        draft.put(None, "no evaluation rows", eval_strategy="no")
        draft.recipe.pop("eval_steps", None)
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if draft.value(name):
            draft.remark("no_evaluation", key=draft.recipe[name].key or name)
            del draft.recipe[name]


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """(trainer, its keys without those that are empty)."""
    with library_error_as_finding(f"reading {path}"):
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for source in TRAINERS:
        if isinstance(theirs, dict) and not theirs.keys().isdisjoint(table(source)["signs"]):
            return source, {str(key): value for key, value in theirs.items() if value != ""}
    raise refusal("ZR893", path=path)


def _flat(theirs: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """Keys of `nested` blocks become "block.key", after the others."""
    flat = {}
    blocks = {}
    for key, value in theirs.items():
        if isinstance(value, dict) and key in nested:
            blocks |= {f"{key}.{name}": inner for name, inner in value.items() if inner != ""}
        else:
            flat[key] = value
    return flat | blocks


# one key by its row of the table


def _translate(draft: Draft, key: str) -> None:
    value = draft.theirs.get(key)
    row = _row_of(draft, key)
    place = key
    why = key
    if value is None:
        value = row.get("default")
        place = None
        why = f"{draft.source}'s default"
    is_unset = value is None or (row.get("zero_is_unset") and not value)
    if is_unset or not _applies(draft, row):
        return

    if "only" in row:
        row = row | {"values": {one: {row["to"]: one} for one in row["only"]}}
    if "values" in row:
        _put_by_value(draft, key, place, value, why, row)
    elif "to" in row:
        if row.get("list") and isinstance(value, str):
            value = [value]
        draft.put(place, why, **{row["to"]: value}, **row.get("sets", {}))
    elif "within" in row and value:
        [(outer, inner)] = row["within"].items()
        draft.put(place, why, **{outer: {inner: value}}, **row["sets"])

    if value not in (False, 0, "", [], {}):
        draft.add_remarks(key, row)


def _row_of(draft: Draft, key: str) -> Mapping[str, Any]:
    rows = table(draft.source)["keys"]
    row = rows[key] if key in rows else _pattern_row(draft, key)
    if row is None:
        return _unknown(draft.theirs[key])
    return {"to": row} if isinstance(row, str) else row


def _pattern_row(draft: Draft, key: str) -> Mapping[str, Any] | None:
    """Of the table's first pattern that the key fits."""
    for name, row in table(draft.source)["keys"].items():
        if "*" in name and fnmatchcase(key, name):
            return row
    return None


def _unknown(value: Any) -> dict[str, str]:
    shown = repr(value)
    if len(shown) > LONGEST_VALUE:
        shown = f"{shown[:LONGEST_VALUE]}..."
    return {"changes": f"this key is unknown to zero-recipes (value {shown})"}


def _applies(draft: Draft, row: Mapping[str, Any]) -> bool:
    """Whether the key that this one `needs` is set, to one `of` the values if named, and the one in `unless` is not."""
    if draft.theirs.get(row.get("unless")):
        return False
    if "needs" not in row:
        return True
    other = table(draft.source)["keys"].get(row["needs"])
    default = other.get("default") if isinstance(other, dict) else None
    needed = draft.theirs.get(row["needs"], default)
    return bool(needed) and needed in row.get("of", [needed])


def _put_by_value(draft: Draft, key: str, place: str | None, value: Any, why: str, row: Mapping[str, Any]) -> None:
    values = row["values"]
    otherwise = row.get("otherwise")
    for one in value if isinstance(value, list) else [value]:
        name = str(one).lower() if isinstance(one, bool) else one
        if name in values:
            draft.add_remarks(f"{key}: {name}", values[name])
            draft.put(place, why, **{new: text for new, text in values[name].items() if new not in REMARKS})
        elif otherwise is not None:
            draft.add_remarks(key, {"changes": otherwise})
        else:
            draft.remark("value", key=key, value=one)


def _nested_remarks(draft: Draft, place: str, keys: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
    """Of the keys in a mapping of the file that no code reads. `rows`: {key: its row}."""
    for key, value in keys.items():
        row = rows.get(key, _unknown(value))
        if "code" in row or value in (None, False, "", [], {}):
            continue
        ours = [one for one in (value if isinstance(value, list) else [value]) if not _is_among(one, row)]
        if ours:
            draft.add_remarks(f"{place}.{key}", row)


def _is_among(value: Any, row: Mapping[str, Any]) -> bool:
    """Whether the row names this value as one that means the same in a recipe."""
    return value in row.get("same", ())


# what several trainers have


def _template(draft: Draft, key: str, name: str | None, mask: str) -> None:
    """Use the other trainer's template of this name, or the tokenizer's own. `mask`: assistant_mask."""
    draft.put(key, f"loss, {draft.source}", assistant_only_loss=True, assistant_mask=mask)
    if name in (None, "tokenizer_default"):
        return
    parts = table("templates")[draft.source].get(name)
    if parts is None:
        draft.remark("template", key=key, name=name)
    else:
        _write_template(draft, key, name, parts, mask)


def _write_template(draft: Draft, key: str, name: str, parts: Mapping[str, Any], mask: str) -> None:
    templates = table("templates")
    file = draft.at.with_suffix(".jinja")
    if "trl" in parts:
        carried = resources.files("trl").joinpath("chat_templates", f"{parts['trl']}.jinja")
        draft.files[file] = carried.read_text()
    else:
        values = templates["parts"] | parts | {"strict": mask == "turn"}
        lines = [f"{{%- set {key} = {json.dumps(value)} %}}\n" for key, value in values.items()]
        draft.files[file] = "".join(lines) + templates["body"]
    draft.put(key, f"template {name}", chat_template_path=str(file), **parts.get("sets", {}))


def _sharding(draft: Draft, named: str | dict[str, Any] | None) -> None:
    """An accelerate file for FSDP, and for a ds_config that the other trainer brings. Another is copied.

    `named`: the key `deepspeed`.
    """
    if not named:
        _fsdp(draft)
        return
    if isinstance(named, dict):
        draft.put("deepspeed", "deepspeed", deepspeed=named)
        return
    found = _upwards(draft.path, named)
    row = table(draft.source)["deepspeed"].get(Path(named).name)
    if row is not None and (found is None or _is_strategy(found, row["strategy"])):
        draft.add_remarks("deepspeed", row)
        draft.put("deepspeed", "deepspeed", accelerate_config=f"{row['strategy']}.yaml")
    elif found is None:
        draft.remark("no_ds_config", named=named)
    else:
        copy = draft.at.with_name(found.name)
        draft.remark("ds_config", named=named)
        with library_error_as_finding(f"reading {found}"):
            draft.files[copy] = found.read_text(encoding="utf-8")
        draft.put("deepspeed", "deepspeed", deepspeed=str(copy))


def _is_strategy(path: Path, name: str) -> bool:
    """Whether it shards as the well-known file of its name."""
    with library_error_as_finding(f"reading {path}"):
        config = DsConfig(read_json_mapping(path))
    return config.name == name and config.optimizer is None


def _fsdp(draft: Draft) -> None:
    theirs = draft.theirs
    blocks = ("fsdp", "fsdp_config")
    if not any(value for key, value in theirs.items() if key.partition(".")[0] in blocks):
        return
    if str(theirs.get("fsdp")).endswith(".json"):
        draft.remark("fsdp_file", named=theirs["fsdp"])
    if theirs.get("load_in_8bit"):
        draft.put("fsdp", "fsdp", accelerate_config="zero2.yaml")
        draft.remark("fsdp_8bit")
    else:
        draft.put("fsdp", "fsdp", accelerate_config="fsdp2.yaml")


def _upwards(path: Path, named: str) -> Path | None:
    """Seen from the current folder or from one above `path`."""
    for folder in (Path.cwd(), *path.absolute().parents):
        with contextlib.suppress(OSError):  # a name that no file system takes
            if (folder / named).is_file():
                return folder / named
    return None


def _entry(path: str, columns: Mapping[str, str | None], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `datasets`. `columns`: {ours: theirs}; `theirs`: keys that keep their names."""
    kind = FORMATS.get(Path(path).suffix)
    entry = {"path": kind, "data_files": path} if kind else {"path": path}
    for new, old in columns.items():
        if old not in (None, new):
            entry.setdefault("columns", {})[new] = old
    for key in ("name", "split", "data_files"):
        if theirs.get(key):
            entry[key] = theirs[key]
    return entry


def _message_columns(mappings: Mapping[str, str | None]) -> dict[str, str]:
    """Of an entry's `columns`: the keys of a message. `mappings`: {ours: theirs}.

    Where nothing is renamed none is needed. Where one is, all stand there: rows may have both names.
    """
    named = {key: theirs for key, theirs in mappings.items() if theirs is not None}
    if all(key == theirs for key, theirs in named.items()):
        return {}
    return {f"messages.{key}": theirs for key, theirs in named.items()}


def _other_roles(roles: Mapping[str, str | list[str] | None]) -> list[str]:
    """Names of speakers that zero-recipes does not take for this role. `roles`: {role: names}."""
    known = package_yaml("zero_recipes.data", "forms.yaml")["roles"]
    others = []
    for role, names in roles.items():
        for name in [names] if isinstance(names, str) else names or []:
            if known.get(name.lower()) != role:
                others.append(name)
    return others


# axolotl


def _axolotl(draft: Draft, file: import_models.Axolotl) -> None:
    _axolotl_data(draft, file)
    if draft.theirs.get("lora_target_linear"):
        for name in draft.theirs.get("lora_target_modules", []):
            if "embed" in name or name in ("wte", "lm_head"):
                draft.remark("all_linear_and_others", key="lora_target_modules")
    draft.put(None, "axolotl's default, where it is at most 100 steps", warmup_steps=0.03)
    _axolotl_interval(draft, "save", "epoch", file.saves_per_epoch, file.num_epochs)
    if file.val_set_size:
        _axolotl_interval(draft, "eval", "no", file.evals_per_epoch, file.num_epochs)
    _sharding(draft, file.deepspeed)


def _axolotl_data(draft: Draft, file: import_models.Axolotl) -> None:
    entries = []
    for number, one in enumerate(file.datasets or []):
        entry = _axolotl_entry(draft, f"datasets.{number}", one)
        if entry is None:
            draft.remark("no_path", key=f"datasets.{number}")
        else:
            entries.append(entry)
    draft.put("datasets", "datasets", datasets=entries)
    if not file.datasets:
        return

    kinds = sorted({_kind_of(one) for one in file.datasets})
    first = file.datasets[0]
    if len({(one.chat_template, one.conversation) for one in file.datasets}) > 1:
        draft.remark("templates")
    if kinds == ["alpaca"]:
        draft.put("datasets", "type alpaca", dataset_format="alpaca", completion_only_loss=not file.train_on_inputs)
    elif kinds == ["chat_template"]:
        _axolotl_template(draft, file, first.chat_template or file.chat_template)
    elif kinds == ["sharegpt"]:
        _axolotl_template(draft, file, first.conversation or "vicuna_v1.1")
    elif kinds == ["a mapping"]:
        forms = [one.type.model_dump() for one in file.datasets]
        if forms.count(forms[0]) < len(forms) or not _axolotl_format(draft, file, first.type):
            draft.remark("type", kinds="with these texts")
    elif kinds != ["completion"]:
        draft.remark("type", kinds=" and ".join(kinds))


def _kind_of(one: import_models.AxolotlDataset) -> str:
    if isinstance(one.type, import_models.AxolotlFormat):
        return "a mapping"
    return (one.type or "none").strip()


def _axolotl_entry(draft: Draft, place: str, one: import_models.AxolotlDataset) -> dict[str, Any] | None:
    """None without a path."""
    known = table("axolotl")
    keys = one.keys_set()
    _nested_remarks(draft, place, keys, known["dataset"])
    kind = _kind_of(one)
    columns: dict[str, str | None] = {}
    if kind == "a mapping":
        _nested_remarks(draft, f"{place}.type", one.type.keys_set(), known["format"])
        columns = {new: getattr(one.type, old) for new, old in known["columns"].items()}
    elif kind == "completion":
        columns = {"text": one.field}
    elif kind in ("chat_template", "sharegpt"):
        columns = _axolotl_columns(one, kind)
        for name in _other_roles(one.roles or {}):
            draft.remark("role", key=f"{place}.roles", name=name)
    if one.path is None and (one.data_files is None or one.data_files == []):
        return None
    path = one.path or keys.get("ds_type") or "json"
    return _entry(path, columns, keys | {"split": one.split or one.train_on_split})


def _axolotl_columns(one: import_models.AxolotlDataset, kind: str) -> dict[str, str | None]:
    mappings: dict[str, str | None] = {}
    messages = one.field_messages
    if kind == "sharegpt":
        messages = messages or "conversations"
        mappings = {"role": "from", "content": "value"}
    mappings |= one.message_property_mappings or {}
    if one.message_field_role:  # the older keys
        mappings["role"] = one.message_field_role
    if one.message_field_content:
        mappings["content"] = one.message_field_content
    if mappings:
        mappings = {"role": "role", "content": "content"} | mappings
    return {"messages": messages, "tools": one.field_tools} | _message_columns(mappings)


def _axolotl_template(draft: Draft, file: import_models.Axolotl, name: str | None) -> None:
    key = "chat_template" if file.chat_template else "datasets"
    _template(draft, key, name, "answer")
    if not {"eot_tokens", "special_tokens.eos_token"} & draft.theirs.keys():
        draft.remark("end_of_turn")
    if file.train_on_inputs:
        draft.remark("all_roles")


def _axolotl_format(draft: Draft, file: import_models.Axolotl, form: import_models.AxolotlFormat) -> bool:
    """The texts around an instruction, as a chat template. False if no template writes the same."""
    words = form.no_input_format
    head, instruction, tail = words.partition("{instruction}")
    before, _, after = form.system_format.partition("{system}")
    joins_input = form.format in (words, words.replace(instruction, f"{instruction}\n{{input}}"))
    if not (joins_input and instruction) or set("{}") & set(head + tail + before + after):
        return False
    parts = table("templates")["around"] | {"system": form.system_prompt}
    parts["heads"] = {"system": before, "user": head, "assistant": ""}
    parts["ends"] = {"system": after, "user": tail, "assistant": ""}
    _template(draft, "datasets", None, "answer")
    _write_template(draft, "datasets", "of `format`", parts, "answer")
    draft.remarks["note"] |= table("axolotl")["format_notes"]
    if file.train_on_inputs:
        draft.put("train_on_inputs", "train_on_inputs", assistant_only_loss=False, completion_only_loss=False)
    return True


def _axolotl_interval(draft: Draft, verb: str, usual: str, per_epoch: float | None, epochs: float | None) -> None:
    """When a run saves or evaluates."""
    steps = draft.theirs.get(f"{verb}_steps")
    if not steps:
        times = (per_epoch or 0) * (1 if epochs is None else epochs)
        steps = 1 / times if times > 1 else None  # a share of all steps
    if steps:
        when = {f"{verb}_strategy": "steps", f"{verb}_steps": steps}
    else:
        when = {f"{verb}_strategy": draft.theirs.get(f"{verb}_strategy", usual)}
    named = [key for key in (f"{verb}_steps", f"{verb}s_per_epoch", f"{verb}_strategy") if key in draft.theirs]
    draft.put(named[0] if named else None, f"axolotl's {verb} keys", **when)


# LLaMA-Factory


def _factory(draft: Draft, file: import_models.Factory) -> None:
    if file.stage == "pt":
        _factory_pretraining(draft)
    else:
        draft.put(None, "always in LLaMA-Factory", dataset_format="chat")
        _template(draft, "template", file.template, "turn")
    _factory_adapter(draft, file)
    _factory_data(draft, file)
    _sharding(draft, file.deepspeed)


def _factory_pretraining(draft: Draft) -> None:
    """Every token of a text has a loss, and no template is used."""
    if draft.theirs.get("template") == "llama3":
        draft.remark("pretraining_end")
    if draft.theirs.get("packing") is not False:
        draft.put("packing", "stage pt", packing=True)
        draft.remark("pretraining_packs")


def _factory_adapter(draft: Draft, file: import_models.Factory) -> None:
    kind = file.finetuning_type or "lora"
    if kind not in ("lora", "oft"):
        return
    targets = file.oft_target if kind == "oft" else file.lora_target
    names = targets if isinstance(targets, list) else (targets or "all").split(",")
    modules = [name.strip() for name in names]
    modules = ["all-linear" if name == "all" else name for name in modules]
    draft.put(f"{kind}_target", f"{kind}_target", lora_target_modules=modules)
    if file.loraplus_lr_ratio and any("embed" in name or name == "wte" for name in modules):
        draft.remark("embeddings")
    if kind == "lora":
        rank = 8 if file.lora_rank is None else file.lora_rank
        draft.put(None, "LLaMA-Factory's default, twice the rank", lora_alpha=2 * rank)


def _factory_data(draft: Draft, file: import_models.Factory) -> None:
    """By dataset_info.json, or the table's subsets of a repository."""
    infos, folder = _factory_infos(draft, file.dataset_dir)
    names = file.dataset if isinstance(file.dataset, list) else (file.dataset or "").split(",")
    entries = []
    for name in filter(None, map(str.strip, names)):
        entry = None
        if name in infos:
            described_in = folder / "dataset_info.json"
            model = import_models.FactoryDataset
            info = import_models.validated(model, infos[name], described_in, draft.source, within=name)
            entry = _factory_entry(draft, name, info, folder, file)
        if entry is None:
            draft.remark("subset", name=name)
            # no name of the Hub: another's rows could have it
            entry = _entry(f"./{name}", {}, {"split": _first_rows(None, file.max_samples)})
        entries.append(entry)
    draft.put("dataset", "dataset, by dataset_info.json", datasets=entries)


def _factory_infos(draft: Draft, named: str | dict[str, Any] | None) -> tuple[dict[str, Any], Path]:
    """(what dataset_info.json says of each data set, the folder that its files are in)."""
    if isinstance(named, dict):
        return named, Path()
    repository = (named or "data").removeprefix("REMOTE:")
    subsets = table("LLaMA-Factory")["remote"]
    if repository in subsets:
        draft.remark("subsets", repository=repository)
        return {name: {"hf_hub_url": repository, "subset": name} for name in subsets[repository]}, Path()
    path = _upwards(draft.path, f"{repository}/dataset_info.json")
    if path is None:
        return {}, Path(repository)
    return read_json_mapping(path), path.parent


def _factory_entry(
    draft: Draft, name: str, info: import_models.FactoryDataset, folder: Path, file: import_models.Factory
) -> dict[str, Any] | None:
    """None where the rows are neither a file nor on the Hub."""
    known = table("LLaMA-Factory")
    _nested_remarks(draft, f"dataset.{name}", info.keys_set(), known["dataset"])
    named = info.columns or {}
    _nested_remarks(draft, f"dataset.{name}.columns", named, known["column_rows"])
    _nested_remarks(draft, f"dataset.{name}.tags", info.tags or {}, known["tag_rows"])
    columns: dict[str, str | None] = {}
    if file.stage == "pt":
        columns = {"text": named.get("prompt", "instruction")}
    else:
        for key, new in known["columns"].items():
            columns[new] = named.get(key)
        if info.formatting != "alpaca":
            columns |= _factory_messages(draft, name, info)
    path = info.hf_hub_url
    if path is None and info.file_name is not None:
        path = str(folder / info.file_name)
    if path is None:
        return None
    split = _first_rows(info.split, file.max_samples)
    return _entry(path, columns, {"split": split, "name": info.subset})


def _first_rows(split: str | None, count: int | None) -> str | None:
    """A split as `datasets` takes it. `count`: of rows."""
    return f"{split or 'train'}[:{count}]" if count else split


def _factory_messages(draft: Draft, name: str, info: import_models.FactoryDataset) -> dict[str, str | None]:
    """The columns of a conversation, and what its messages call their parts."""
    tags = info.tags or {}
    mappings = {"role": "from", "content": "value"}
    if "role_tag" in tags and "content_tag" in tags:
        mappings = {"role": tags["role_tag"], "content": tags["content_tag"]}
    elif info.formatting == "openai":
        mappings = {}
    speakers = table("LLaMA-Factory")["speakers"]
    for other in _other_roles({role: tags.get(tag) for tag, role in speakers.items()}):
        draft.remark("role", key=f"dataset.{name}.tags", name=other)
    return _message_columns(mappings)


TRAINERS = {"axolotl": _axolotl, "LLaMA-Factory": _factory}
