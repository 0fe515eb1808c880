"""`zero-recipes import FILE`: what another trainer is told, as a recipe.

What each of its keys is here, and what it takes where a key is missing, are tables (config/imports); what no table can
say is code here.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config.keys import FORMATS
from zero_recipes.core.files import package_yaml, write_text
from zero_recipes.core.findings import finding, library_error_as_finding, raise_errors, refusal

FIRST = {"model_name_or_path": 0, "datasets": 1}  # of a recipe's keys


def table(name: str) -> dict[str, Any]:
    """A file of config/imports."""
    return package_yaml("zero_recipes.config", f"imports/{name}.yaml")


class Draft:
    """A recipe while it is written: {key: (value, where it is from)}; what is not in it, by the other's key; and files
    beside it."""

    def __init__(self, path: Path, recipe: Path, source: str, theirs: Mapping[str, Any]):
        self.path, self.at, self.source, self.theirs, self.recipe = path, recipe, source, theirs, {}
        self.files, self.note, self.loses, self.changes = {}, {}, {}, {}

    def put(self, why: str, **values: Any) -> None:
        for key, value in values.items():
            merged = self.recipe[key][0] | value if isinstance(value, dict) and key in self.recipe else value
            self.recipe[key] = merged, why

    def remarks(self) -> list[str]:
        titles = {"not supported": self.loses, "training differs": self.changes, "note": self.note}
        return [f"{title}: {key}: {effect}" for title, items in titles.items() for key, effect in items.items()]

    def text(self) -> str:
        lines = [
            f"# {line}" for line in (f"Written by zero-recipes import {self.path} ({self.source}).", *self.remarks())
        ]
        for key, (value, why) in sorted(self.recipe.items(), key=lambda item: FIRST.get(item[0], 2)):
            first, *rest = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000).splitlines()
            lines += [first if why == key else f"{first}  # {why}", *rest]
        return "\n".join(lines) + "\n"


def import_(arguments: argparse.Namespace) -> int:
    recipe = arguments.output or Path(f"{arguments.file.stem}.recipe.yaml")
    draft = translated(arguments.file, recipe)
    changed = draft.changes.keys() - set(arguments.allow or ())
    where = {"file": draft.path, "source": draft.source}
    raise_errors([finding("ZR894", key=key, effect=draft.changes[key], **where) for key in sorted(changed)])
    print(*draft.remarks(), sep="\n")
    write_new({recipe: draft.text()} | draft.files)
    print(f"zero-recipes check {recipe} --data")
    return 0


def write_new(texts: Mapping[Path, str]) -> None:
    """Raises Refusal where one of the files is there."""
    if there := [path for path in texts if path.exists()]:
        raise refusal("ZR895", path=there[0])
    for path, text in texts.items():
        write_text(path, text)
        print(f"written: {path}")


def translated(path: Path, recipe: Path) -> Draft:
    """What a file of another trainer is as a recipe, which is to be written to `recipe`. Raises Refusal for a file of
    none of them."""
    source, theirs = _read(path)
    theirs = _flat(theirs, table(source).get("nested", ()))
    draft, rows = Draft(path, recipe, source, theirs), table(source)["keys"]
    draft.put(f"always in {source}", **table(source)["always"])
    {"axolotl": _axolotl, "LLaMA-Factory": _factory, "torchtune": _torchtune}[source](draft, theirs)
    for key in [*(key for key in rows if "*" not in key), *sorted(theirs.keys() - rows)]:
        row = rows.get(key) or next((rows[name] for name in rows if fnmatchcase(key, name)), None)
        _translate(draft, key, {"to": row} if isinstance(row, str) else row)
    names, why = draft.recipe.get("lora_target_modules", ([], ""))
    if len(names) > 1 and "all-linear" in names:  # PEFT knows it alone, and TRL has no adapter on the LM head
        draft.changes[why] = "LoRA on all linear layers and on others"
    if args := draft.recipe.get("optim_args", ({}, ""))[0]:
        draft.put("the optimizer's keys", optim_args=", ".join(f"{key}={value}" for key, value in args.items()))
    if not draft.recipe["datasets"][0] and not draft.changes:
        draft.changes["datasets"] = "the file names none"
    return draft


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    with library_error_as_finding(f"reading {path}"):
        theirs = yaml.safe_load(text)
    for source in ("axolotl", "LLaMA-Factory", "torchtune"):
        if isinstance(theirs, dict) and not theirs.keys().isdisjoint(table(source)["signs"]):
            filled = re.sub(r"\$\{(\w+)\}", lambda name: str(theirs.get(name[1], name[0])), text)
            return source, yaml.safe_load(filled)
    raise refusal("ZR893", path=path)


def _flat(theirs: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """{"outer.inner": value} of the keys of `nested`."""
    deep = {key: value for key, value in theirs.items() if isinstance(value, dict) and key in nested}
    flat = {f"{key}.{name}": value for key, inner in deep.items() for name, value in inner.items()}
    return {key: value for key, value in theirs.items() if key not in deep} | flat


def _translate(draft: Draft, key: str, row: Mapping[str, Any] | None) -> None:
    """One key by its row of the table."""
    value, why = draft.theirs.get(key), key
    unknown = {"changes": f"this key is unknown to zero-recipes (value {value!r})"}
    row, tuned = row or unknown, table(draft.source).get("tuned")
    if value is None:
        value, why = row.get("default"), f"{draft.source}'s default"
        value = value[draft.theirs.get(tuned, "lora")] if isinstance(value, dict) else value
    other = table(draft.source)["keys"].get(row.get("needs"))
    needed = draft.theirs.get(row.get("needs"), other.get("default") if isinstance(other, dict) else None)
    if value is None or ("needs" in row and (not needed or needed not in row.get("of", [needed]))):
        return
    values = row.get("values") or ({one: {row["to"]: one} for one in row["only"]} if "only" in row else None)
    if values is not None:
        for one in value if isinstance(value, list) else [value]:
            known = values.get(str(one).lower() if isinstance(one, bool) else one)
            draft.changes |= {key: f"the value {one!r} is not supported"} if known is None else {}
            draft.put(why, **(known or {}))
    elif "to" in row:
        value = float(value) if row.get("number") else [value] if row.get("list") and isinstance(value, str) else value
        draft.put(why, **{row["to"]: value}, **row.get("sets", {}))
    elif "within" in row and value:
        draft.put(why, **{outer: {inner: value} for outer, inner in row["within"].items()}, **row["sets"])
    if value not in (False, 0, "", [], {}):
        for kind in {"note", "loses", "changes"} & row.keys():
            getattr(draft, kind)[key] = row[kind]


# what several of them have


def _template(draft: Draft, name: str | None, mask: str, **more: Any) -> None:
    """Turns as the other trainer's template of this name writes them, with `more` parts, or as the tokenizer's own."""
    parts, file = table("templates")[draft.source].get(name, {}) | more, draft.at.with_suffix(".jinja")
    body = "messages" if mask == "template" else "body"
    draft.put(f"loss, {draft.source}", assistant_only_loss=True, assistant_mask=mask)
    if set(more.get("loss", ())) - {"assistant"}:  # the template marks prompts on purpose
        draft.put(f"prompts have a loss, {draft.source}", ignore=["ZR527"])
    if name in (None, "tokenizer_default"):
        return
    if "trl" in parts:
        draft.files[file] = resources.files("trl").joinpath("chat_templates", f"{parts['trl']}.jinja").read_text()
    elif parts.keys() - more:
        known = table("templates")["parts"] | parts | {"strict": mask == "turn"}
        sets = "".join(f"{{%- set {key} = {json.dumps(value)} %}}\n" for key, value in known.items())
        draft.files[file] = sets + table("templates")[body]
    else:
        draft.changes["template"] = f"the template {name!r} is not supported"
    draft.loses |= {"template": parts["loses"]} if "loses" in parts else {}
    draft.put(f"template {name}", chat_template_path=str(file), **parts.get("sets", {}))


def _sharding(draft: Draft) -> None:
    """The ds_config beside the recipe; for FSDP the accelerate file that is named."""
    named = draft.theirs.get("deepspeed")
    found = named and _upwards(draft.path, named)
    if found:
        draft.files[draft.at.with_name(found.name)] = found.read_text(encoding="utf-8")
        draft.put("deepspeed", deepspeed=str(draft.at.with_name(found.name)))
    elif named:
        draft.loses["deepspeed"] = f"{named} was not found; zero-recipes plan recommends a strategy"
    elif any(value for key, value in draft.theirs.items() if key.partition(".")[0] in ("fsdp", "fsdp_config")):
        if str(draft.theirs.get("fsdp")).endswith(".json"):
            draft.loses["fsdp"] = f"{draft.theirs['fsdp']} is not read: fsdp2.yaml shards weights, offloads nothing"
        draft.put("fsdp", accelerate_config="zero2.yaml" if draft.theirs.get("load_in_8bit") else "fsdp2.yaml")
        if draft.theirs.get("load_in_8bit"):
            draft.loses["fsdp"] = "every GPU holds all 8-bit weights (ZeRO-2), because FSDP2 cannot shard them"


def _upwards(path: Path, named: str) -> Path | None:
    """The file of this name, seen from the current folder or from a folder above `path`."""
    return next((at / named for at in (Path.cwd(), *path.absolute().parents) if (at / named).is_file()), None)


def _entry(path: str, **more: Any) -> dict[str, Any]:
    """An entry of `datasets`; what is empty is left out."""
    kind = FORMATS.get(Path(path).suffix)
    entry = {"path": kind, "data_files": path} if kind else {"path": path}
    more["columns"] = {new: old for new, old in (more.get("columns") or {}).items() if old not in (None, new)}
    return entry | {key: value for key, value in more.items() if value}


# each


def _axolotl(draft: Draft, theirs: Mapping[str, Any]) -> None:
    known, sets, entries = table("axolotl"), theirs.get("datasets") or [], []
    kinds = {str(one.get("type")) for one in sets}
    for one in sets:
        odd = [key for key in one if key not in known["read"] and one[key] not in (None, known["usual"].get(key))]
        if not kinds <= {"alpaca", "chat_template", "completion"} or odd or len(kinds) > 1:
            draft.changes["datasets"] = f"type {', '.join(sorted(kinds))}, {odd or 'in this form'}, is not supported"
        columns = {"text": one.get("field")} if kinds == {"completion"} else {"messages": one.get("field_messages")}
        more = {key: one.get(key) for key in ("name", "split", "data_files")}
        entries.append(_entry(one["path"], columns=columns, **more))
    draft.put("datasets", datasets=entries)
    if kinds == {"alpaca"}:
        draft.put("type alpaca", dataset_format="alpaca", completion_only_loss=not theirs.get("train_on_inputs"))
    elif kinds == {"chat_template"}:
        _template(draft, sets[0].get("chat_template") or theirs.get("chat_template"), "answer")
        if not {"eot_tokens", "special_tokens.eos_token"} & theirs.keys():
            draft.note["eot_tokens"] = "the end of a turn is supervised; in axolotl only if it is the eos_token"
        if theirs.get("train_on_inputs"):
            draft.changes["train_on_inputs"] = "the text of all roles is supervised, without the template's own tokens"
    draft.put("axolotl's default, where it is at most 100 steps", warmup_steps=0.03)
    epochs = theirs.get("num_epochs", 1)
    for verb, usual in (("save", "epoch"), ("eval", "no")):
        often, steps = theirs.get(f"{verb}s_per_epoch") or 0, theirs.get(f"{verb}_steps")
        steps = steps or (1 / (often * epochs) if often * epochs > 1 else None)
        when = {f"{verb}_strategy": "steps" if steps else theirs.get(f"{verb}_strategy", usual)}
        if verb == "save" or theirs.get("val_set_size"):
            draft.put(f"axolotl's {verb} keys", **when, **({f"{verb}_steps": steps} if steps else {}))
    _sharding(draft)


def _factory(draft: Draft, theirs: Mapping[str, Any]) -> None:
    _template(draft, theirs.get("template"), "turn")
    if (kind := theirs.get("finetuning_type", "lora")) in ("lora", "oft"):
        modules = theirs.get(f"{kind}_target", "all").replace("all", "all-linear").replace(" ", "").split(",")
        draft.put(f"{kind}_target", lora_target_modules=modules)
        if theirs.get("loraplus_lr_ratio") and any("embed" in name or name == "wte" for name in modules):
            draft.changes["lora_target"] = "LoRA+ gives one of the two matrices of an embedding the usual learning rate"
    if kind == "lora":
        draft.put("LLaMA-Factory's default, twice the rank", lora_alpha=2 * theirs.get("lora_rank", 8))
    repository = str(theirs.get("dataset_dir", "data")).removeprefix("REMOTE:")
    info, subsets = _upwards(draft.path, f"{repository}/dataset_info.json"), table("LLaMA-Factory")["remote"]
    known, entries = json.loads(info.read_text(encoding="utf-8")) if info else {}, []
    if repository in subsets:
        known = {name: {"hf_hub_url": repository, "subset": name} for name in subsets[repository]}
        draft.loses["dataset_dir"] = f"subsets of {repository} by their names: its dataset_info.json is not read"
    renamed = table("LLaMA-Factory")["columns"]
    for name in map(str.strip, str(theirs.get("dataset")).split(",")):
        row = known.get(name, {})
        path = str(info.with_name(row["file_name"])) if "file_name" in row else row.get("hf_hub_url")
        odd = {*row.get("columns", {})} - {*renamed} | {"ranking", "folder"} & row.keys()
        if odd or path is None:
            draft.changes["dataset"] = f"{name} has {', '.join(sorted(odd)) or 'no file and no Hub name'}"
            continue
        count, columns = theirs.get("max_samples"), {renamed[key]: old for key, old in row.get("columns", {}).items()}
        split = f"{row.get('split', 'train')}[:{count}]" if count else row.get("split")
        entries.append(_entry(path, columns=columns, split=split, name=row.get("subset")))
    draft.put("dataset, by dataset_info.json", datasets=entries)
    draft.note["cutoff_len"] = "longer rows are truncated at the end; there, prompt and answer in proportion"
    _sharding(draft)


def _torchtune(draft: Draft, theirs: Mapping[str, Any]) -> None:
    known, entries, loss = table("torchtune"), [], set()
    text, folder = draft.path.read_text(encoding="utf-8"), str(theirs.get("checkpointer.checkpoint_dir"))
    names = [name for name in re.findall(r"tune download (\S+)", text) if name.rpartition("/")[2] in folder]
    draft.put("tune download" if names else "checkpointer.checkpoint_dir", model_name_or_path=(*names, folder)[0])
    if (launch := re.search(r"--nproc_per_node (\d+) \w+_distributed", text)) is not None:
        draft.put("tune run", accelerate_config="fsdp2.yaml", num_processes=int(launch[1]))
    sets = theirs.get("dataset") or []
    for one in sets if isinstance(sets, list) else [sets]:
        row = known["data"].get(one.get("_component_", "").rpartition(".")[2], {"path": None, "all": False})
        odd = [key for key in one if key not in known["read"] and one[key] is not None]
        if odd or "dataset_format" not in row:
            draft.changes["dataset"] = f"{one.get('_component_')}, {odd or 'of this kind'}, is not supported"
        columns = one.get("column_map") or {"messages": one.get("conversation_column")}
        more = {key: one.get(key, row.get(key)) for key in ("name", "split", "data_files", "dataset_format")}
        entries.append(_entry(str(one.get("source", row["path"])), columns=columns, **more))
        loss.add((bool(one.get("train_on_input", row["all"])), bool(one.get("packed"))))
    if len(loss) > 1:
        draft.changes["dataset"] = "only some data sets have a loss on prompts, or packing"
    everything, packing = max(loss, default=(False, False))
    draft.put("dataset", datasets=entries, packing=packing)
    tokenizer = str(theirs.get("tokenizer._component_")).rpartition(".")[2]
    _template(draft, tokenizer, "template", loss=["user", "assistant"] if everything else ["assistant"])
    of, _, builder = str(theirs.get("model._component_")).rpartition(".")
    if not of.startswith("torchtune.models"):
        draft.changes["model"] = f"{of}.{builder} is not supported"
    if builder.startswith(("lora_", "qlora_")):
        named = [*theirs.get("model.lora_attn_modules", []), *(key for key in known["modules"] if theirs.get(key))]
        modules = [module for name in named for module in known["modules"].get(name, [name])]
        draft.put("model", use_peft=True, lora_target_modules=modules)
        draft.note["save_adapter_weights_only"] = "only the adapter is saved; zero-recipes export merges it"
    elif theirs.get("optimizer.weight_decay") != 0:
        draft.loses["optimizer.weight_decay"] = "norm weights have no weight decay, as in transformers"
    if builder.startswith("qlora_") or theirs.get("model.quantize_base"):
        draft.put("model", **known["quantized"])
    if theirs.get("max_steps_per_epoch") and theirs.get("epochs") != 1:
        draft.changes["max_steps_per_epoch"] = "an epoch would not end there"
