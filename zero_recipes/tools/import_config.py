"""`zero-recipes import FILE`: another trainer's file as a recipe.

Tables in config/imports map its keys and name its defaults.
What no table can say is code here.
"""

import argparse
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
from zero_recipes.core.findings import finding, library_error_as_finding, raise_errors, refusal

FIRST = {"model_name_or_path": 0, "datasets": 1}  # of a recipe's keys
REMARKS = {"note", "loses", "changes"}


def table(name: str) -> dict[str, Any]:
    """A file of config/imports."""
    return package_yaml("zero_recipes.config", f"imports/{name}.yaml")


@dataclass
class Draft:
    """A recipe in the making, and what it lacks."""

    path: Path  # of the other trainer's file
    at: Path  # where the recipe will be
    source: str  # the other trainer
    theirs: dict[str, Any]  # its keys: "optimizer.lr" stands in the block `optimizer`
    recipe: dict[str, tuple[Any, str]] = field(default_factory=dict)  # {key: (value, where it is from)}
    files: dict[Path, str] = field(default_factory=dict)  # beside the recipe
    # by the other trainer's key
    note: dict[str, str] = field(default_factory=dict)
    loses: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)

    def put(self, why: str, **values: Any) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and key in self.recipe:
                value = self.recipe[key][0] | value
            self.recipe[key] = (value, why)

    def remark(self, which: str, **values: Any) -> None:
        """Of effects.yaml. `values`: in its text."""
        row = {word: text.format(**values) for word, text in table("effects")[which].items()}
        _remark(self, row["key"], row)

    def remarks(self) -> list[str]:
        titles = {"not supported": self.loses, "training differs": self.changes, "note": self.note}
        lines = []
        for title, effects in titles.items():
            lines += [f"{title}: {key}: {effect}" for key, effect in effects.items()]
        return lines

    def text(self) -> str:
        lines = [f"# Written by zero-recipes import {self.path} ({self.source})."]
        lines += [f"# {remark}" for remark in self.remarks()]
        for key in sorted(self.recipe, key=lambda key: FIRST.get(key, 2)):
            value, why = self.recipe[key]
            text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000)
            first, *rest = text.splitlines()
            lines.append(first if why == key else f"{first}  # {why}")
            lines += rest
        return "\n".join(lines) + "\n"


def import_(arguments: argparse.Namespace) -> int:
    recipe = arguments.output or Path(f"{arguments.file.stem}.recipe.yaml")
    draft = translated(arguments.file, recipe)
    refused = []
    for key in sorted(draft.changes.keys() - set(arguments.allow or ())):
        refused.append(finding("ZR894", key=key, effect=draft.changes[key], file=draft.path, source=draft.source))
    raise_errors(refused)
    print(*draft.remarks(), sep="\n")
    write_new({recipe: draft.text()} | draft.files)
    print(f"zero-recipes check {recipe} --data")
    file, _ = draft.recipe.get("accelerate_config", (None, ""))
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
    """Translate another trainer's file into a draft. Raises Refusal for an unknown trainer."""
    source, theirs = _read(path)
    known = table(source)
    draft = Draft(path, recipe, source, _flat(theirs, known.get("nested", ())))
    draft.put(f"always in {source}", **known["always"])
    TRAINERS[source](draft)
    for key in known["keys"]:
        if "*" not in key:
            _translate(draft, key)
    for key in sorted(draft.theirs.keys() - known["keys"]):
        _translate(draft, key)

    keeps_best, _ = draft.recipe.get("load_best_model_at_end", (False, ""))
    eval_steps, _ = draft.recipe.get("eval_steps", (None, ""))
    if keeps_best and eval_steps:
        draft.put("any evaluation may be the best", save_steps=eval_steps)
    names, why = draft.recipe.get("lora_target_modules", ([], ""))
    if len(names) > 1 and "all-linear" in names:  # PEFT knows it alone, and TRL has no adapter on the LM head
        draft.remark("all_linear_and_others", key=why)
    optim_args, _ = draft.recipe.get("optim_args", ({}, ""))
    if optim_args:
        words = [f"{key}={value}" for key, value in optim_args.items()]
        draft.put("the optimizer's keys", optim_args=", ".join(words))
    if not draft.recipe["datasets"][0] and not draft.changes:
        draft.remark("no_data")
    return draft


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """(trainer, its keys)."""
    with library_error_as_finding(f"reading {path}"):
        theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for source in TRAINERS:
        if isinstance(theirs, dict) and not theirs.keys().isdisjoint(table(source)["signs"]):
            return source, theirs
    raise refusal("ZR893", path=path)


def _flat(theirs: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """Keys of `nested` blocks become "block.key", after the others."""
    flat = {}
    blocks = {}
    for key, value in theirs.items():
        if isinstance(value, dict) and key in nested:
            blocks |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat | blocks


# one key by its row of the table


def _translate(draft: Draft, key: str) -> None:
    value = draft.theirs.get(key)
    row = _row_of(draft, key)
    why = key
    if value is None:
        value = row.get("default")
        why = f"{draft.source}'s default"
    is_unset = value is None or (row.get("zero_is_unset") and not value)
    if is_unset or not _applies(draft, row):
        return

    if "only" in row:
        _put_by_value(draft, key, value, why, {one: {row["to"]: one} for one in row["only"]})
    elif "values" in row:
        _put_by_value(draft, key, value, why, row["values"])
    elif "to" in row:
        if row.get("number"):
            value = float(value)
        elif row.get("list") and isinstance(value, str):
            value = [value]
        draft.put(why, **{row["to"]: value}, **row.get("sets", {}))
    elif "within" in row and value:
        [(outer, inner)] = row["within"].items()
        draft.put(why, **{outer: {inner: value}}, **row["sets"])

    if value not in (False, 0, "", [], {}):
        _remark(draft, key, row)


def _remark(draft: Draft, key: str, row: Mapping[str, Any]) -> None:
    for kind in REMARKS & row.keys():
        getattr(draft, kind)[key] = row[kind]


def _row_of(draft: Draft, key: str) -> Mapping[str, Any]:
    rows = table(draft.source)["keys"]
    for name in [key] if key in rows else rows:
        if fnmatchcase(key, name):  # a name of the table may be a pattern
            row = rows[name]
            return {"to": row} if isinstance(row, str) else row
    return {"changes": f"this key is unknown to zero-recipes (value {draft.theirs[key]!r})"}


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


def _put_by_value(draft: Draft, key: str, value: Any, why: str, values: Mapping[Any, dict[str, Any]]) -> None:
    for one in value if isinstance(value, list) else [value]:
        name = str(one).lower() if isinstance(one, bool) else one
        if name in values:
            row = values[name]
            _remark(draft, f"{key}: {name}", row)
            draft.put(why, **{new: text for new, text in row.items() if new not in REMARKS})
        else:
            draft.remark("value", key=key, value=one)


# what several trainers have


def _template(draft: Draft, name: str | None, mask: str) -> None:
    """Use the other trainer's template of this name, or the tokenizer's own. `mask`: assistant_mask."""
    draft.put(f"loss, {draft.source}", assistant_only_loss=True, assistant_mask=mask)
    if name in (None, "tokenizer_default"):
        return
    parts = table("templates")[draft.source].get(name)
    if parts is None:
        draft.remark("template", name=name)
    else:
        _write_template(draft, name, parts, mask)


def _write_template(draft: Draft, name: str, parts: Mapping[str, Any], mask: str) -> None:
    templates = table("templates")
    file = draft.at.with_suffix(".jinja")
    if "trl" in parts:
        carried = resources.files("trl").joinpath("chat_templates", f"{parts['trl']}.jinja")
        draft.files[file] = carried.read_text()
    else:
        values = templates["parts"] | parts | {"strict": mask == "turn"}
        lines = [f"{{%- set {key} = {json.dumps(value)} %}}\n" for key, value in values.items()]
        draft.files[file] = "".join(lines) + templates["body"]
    draft.put(f"template {name}", chat_template_path=str(file), **parts.get("sets", {}))


def _sharding(draft: Draft) -> None:
    """An accelerate file for FSDP, and for a ds_config that the other trainer brings. Another is copied."""
    named = draft.theirs.get("deepspeed")
    if not named:
        _fsdp(draft)
        return
    found = _upwards(draft.path, named)
    row = table(draft.source)["deepspeed"].get(Path(named).name)
    if row is not None and (found is None or _is_strategy(found, row["strategy"])):
        _remark(draft, "deepspeed", row)
        draft.put("deepspeed", accelerate_config=f"{row['strategy']}.yaml")
    elif found is None:
        draft.remark("no_ds_config", named=named)
    else:
        copy = draft.at.with_name(found.name)
        draft.remark("ds_config", named=named)
        draft.files[copy] = found.read_text(encoding="utf-8")
        draft.put("deepspeed", deepspeed=str(copy))


def _is_strategy(path: Path, name: str) -> bool:
    """Whether it shards as the well-known file of its name."""
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
        draft.put("fsdp", accelerate_config="zero2.yaml")
        draft.remark("fsdp_8bit")
    else:
        draft.put("fsdp", accelerate_config="fsdp2.yaml")


def _upwards(path: Path, named: str) -> Path | None:
    """Seen from the current folder or from one above `path`."""
    for folder in (Path.cwd(), *path.absolute().parents):
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


# axolotl


def _axolotl(draft: Draft) -> None:
    _axolotl_data(draft)
    draft.put("axolotl's default, where it is at most 100 steps", warmup_steps=0.03)
    _axolotl_interval(draft, "save", "epoch")
    if draft.theirs.get("val_set_size"):
        _axolotl_interval(draft, "eval", "no")
    _sharding(draft)


def _axolotl_data(draft: Draft) -> None:
    theirs = draft.theirs
    known = table("axolotl")
    sets = theirs.get("datasets") or []
    kinds = {str(one.get("type")) for one in sets}
    form = sets[0].get("type") if sets else None
    own_columns = {}
    supported = len(kinds) <= 1 and kinds <= {"alpaca", "chat_template", "completion"}
    if len(kinds) == 1 and isinstance(form, dict):
        form = known["format"] | form
        own_columns = {new: form.get(old) for new, old in known["columns"].items()}
        supported = _axolotl_format(draft, form)
    entries = []
    for one in sets:
        odd = [key for key in one if key not in known["read"] and one[key] not in (None, known["usual"].get(key))]
        if odd or not supported:
            draft.remark("type", kinds=", ".join(sorted(kinds)), odd=odd or "in this form")
        columns = own_columns or {"messages": one.get("field_messages")}
        if kinds == {"completion"}:
            columns = {"text": one.get("field")}
        entries.append(_entry(one["path"], columns, one))
    draft.put("datasets", datasets=entries)

    if kinds == {"alpaca"}:
        draft.put("type alpaca", dataset_format="alpaca", completion_only_loss=not theirs.get("train_on_inputs"))
    elif kinds == {"chat_template"}:
        _template(draft, sets[0].get("chat_template") or theirs.get("chat_template"), "answer")
        if not {"eot_tokens", "special_tokens.eos_token"} & theirs.keys():
            draft.remark("end_of_turn")
        if theirs.get("train_on_inputs"):
            draft.remark("all_roles")


def _axolotl_format(draft: Draft, form: Mapping[str, str]) -> bool:
    """The texts around an instruction, as a chat template. False if no template writes the same."""
    words = form["no_input_format"]
    head, instruction, tail = words.partition("{instruction}")
    before, _, after = form["system_format"].partition("{system}")
    joins_input = form["format"] in (words, words.replace(instruction, f"{instruction}\n{{input}}"))
    if not (joins_input and instruction) or set("{}") & set(head + tail + before + after):
        return False
    parts = table("templates")["around"] | {"system": form["system_prompt"]}
    parts["heads"] = {"system": before, "user": head, "assistant": ""}
    parts["ends"] = {"system": after, "user": tail, "assistant": ""}
    _template(draft, None, "answer")
    _write_template(draft, "of `format`", parts, "answer")
    draft.note |= table("axolotl")["format_notes"]
    if draft.theirs.get("train_on_inputs"):
        draft.put("train_on_inputs", assistant_only_loss=False, completion_only_loss=False)
    return True


def _axolotl_interval(draft: Draft, verb: str, usual: str) -> None:
    """When a run saves or evaluates."""
    steps = draft.theirs.get(f"{verb}_steps")
    if not steps:
        times = (draft.theirs.get(f"{verb}s_per_epoch") or 0) * draft.theirs.get("num_epochs", 1)
        steps = 1 / times if times > 1 else None  # a share of all steps
    if steps:
        when = {f"{verb}_strategy": "steps", f"{verb}_steps": steps}
    else:
        when = {f"{verb}_strategy": draft.theirs.get(f"{verb}_strategy", usual)}
    draft.put(f"axolotl's {verb} keys", **when)


# LLaMA-Factory


def _factory(draft: Draft) -> None:
    _template(draft, draft.theirs.get("template"), "turn")
    _factory_adapter(draft)
    _factory_data(draft)
    _sharding(draft)


def _factory_adapter(draft: Draft) -> None:
    theirs = draft.theirs
    kind = theirs.get("finetuning_type", "lora")
    if kind not in ("lora", "oft"):
        return
    targets = theirs.get(f"{kind}_target", "all").replace("all", "all-linear")
    modules = targets.replace(" ", "").split(",")
    draft.put(f"{kind}_target", lora_target_modules=modules)
    if theirs.get("loraplus_lr_ratio") and any("embed" in name or name == "wte" for name in modules):
        draft.remark("embeddings")
    if kind == "lora":
        draft.put("LLaMA-Factory's default, twice the rank", lora_alpha=2 * theirs.get("lora_rank", 8))


def _factory_data(draft: Draft) -> None:
    """By dataset_info.json, or the table's subsets of a repository."""
    repository = str(draft.theirs.get("dataset_dir", "data")).removeprefix("REMOTE:")
    info = _upwards(draft.path, f"{repository}/dataset_info.json")
    subsets = table("LLaMA-Factory")["remote"]
    known = {}
    if repository in subsets:
        known = {name: {"hf_hub_url": repository, "subset": name} for name in subsets[repository]}
        draft.remark("subsets", repository=repository)
    elif info is not None:
        known = json.loads(info.read_text(encoding="utf-8"))

    renamed = table("LLaMA-Factory")["columns"]
    entries = []
    for word in str(draft.theirs.get("dataset")).split(","):
        name = word.strip()
        row = known.get(name, {})
        columns = row.get("columns", {})
        path = row.get("hf_hub_url")
        if "file_name" in row:
            path = str(info.with_name(row["file_name"]))
        odd = (columns.keys() - renamed.keys()) | ({"ranking", "folder"} & row.keys())
        if odd or path is None:
            draft.remark("subset", name=name, odd=", ".join(sorted(odd)) or "no file and no Hub name")
            continue
        split = row.get("split")
        count = draft.theirs.get("max_samples")
        if count:
            split = f"{split or 'train'}[:{count}]"
        ours = {renamed[key]: old for key, old in columns.items()}
        entries.append(_entry(path, ours, {"split": split, "name": row.get("subset")}))
    draft.put("dataset, by dataset_info.json", datasets=entries)


TRAINERS = {"axolotl": _axolotl, "LLaMA-Factory": _factory}
