"""What no table can say of axolotl's files: data, templates, and when a run saves or evaluates."""

from typing import Any

from zero_recipes.tools.imports.datasets import entry_of, message_columns, remark_other_roles
from zero_recipes.tools.imports.draft import Draft
from zero_recipes.tools.imports.models import Axolotl, AxolotlDataset, AxolotlFormat, table
from zero_recipes.tools.imports.rows import remark_nested
from zero_recipes.tools.imports.sharding import put_sharding
from zero_recipes.tools.imports.templates import put_template, write_template

ONLY_LINEAR = "LoRA on linear layers alone, not on embeddings or the LM head"


def put_axolotl(draft: Draft, file: Axolotl) -> None:
    """Put into the draft what stands in several of axolotl's keys."""
    _data(draft, file)
    if draft.theirs.get("lora_target_linear"):
        for name in draft.theirs.get("lora_target_modules", []):
            if "embed" in name or name in ("wte", "lm_head"):
                draft.changes("lora_target_modules", ONLY_LINEAR)
    draft.put(None, "axolotl's default, where it is at most 100 steps", warmup_steps=0.03)
    _interval(draft, "save", "epoch", file.saves_per_epoch, file.num_epochs)
    if file.val_set_size:
        _interval(draft, "eval", "no", file.evals_per_epoch, file.num_epochs)
    put_sharding(draft, file.deepspeed)


def _data(draft: Draft, file: Axolotl) -> None:
    entries = []
    for number, one in enumerate(file.datasets or []):
        entry = _entry(draft, f"datasets.{number}", one)
        if entry is None:
            draft.changes(f"datasets.{number}", "it names no path, and is left out")
        else:
            entries.append(entry)
    draft.put("datasets", "datasets", datasets=entries)
    if not file.datasets:
        return

    kinds = sorted({_kind_of(one) for one in file.datasets})
    first = file.datasets[0]
    if len({(one.chat_template, one.conversation) for one in file.datasets}) > 1:
        draft.changes("datasets", "all data sets have the first one's chat template")
    if kinds == ["alpaca"]:
        draft.put("datasets", "type alpaca", dataset_format="alpaca", completion_only_loss=not file.train_on_inputs)
    elif kinds == ["chat_template"]:
        _template(draft, file, first.chat_template or file.chat_template)
    elif kinds == ["sharegpt"]:
        _template(draft, file, first.conversation or "vicuna_v1.1")
    elif kinds == ["a mapping"]:
        forms = [one.type.model_dump() for one in file.datasets]
        if forms.count(forms[0]) < len(forms) or not _format(draft, file, first.type):
            _remark_type(draft, "with these texts")
    elif kinds != ["completion"]:
        _remark_type(draft, " and ".join(kinds))


def _remark_type(draft: Draft, kinds: str) -> None:
    text = f"type {kinds} is unknown: the columns decide how rows are read, and no prompt is added"
    draft.changes("datasets", text)


def _kind_of(one: AxolotlDataset) -> str:
    if isinstance(one.type, AxolotlFormat):
        return "a mapping"
    return (one.type or "none").strip()


def _entry(draft: Draft, place: str, one: AxolotlDataset) -> dict[str, Any] | None:
    """None without a path."""
    known = table("axolotl")
    keys = one.keys_set()
    remark_nested(draft, place, keys, known["dataset"])
    kind = _kind_of(one)
    columns: dict[str, str | None] = {}
    if kind == "a mapping":
        remark_nested(draft, f"{place}.type", one.type.keys_set(), known["format"])
        columns = {new: getattr(one.type, old) for new, old in known["columns"].items()}
    elif kind == "completion":
        columns = {"text": one.field}
    elif kind in ("chat_template", "sharegpt"):
        columns = _columns(one, kind)
        remark_other_roles(draft, f"{place}.roles", one.roles or {})
    if one.path is None and (one.data_files is None or one.data_files == []):
        return None
    path = one.path or keys.get("ds_type") or "json"
    return entry_of(path, columns, keys | {"split": one.split or one.train_on_split})


def _columns(one: AxolotlDataset, kind: str) -> dict[str, str | None]:
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
    return {"messages": messages, "tools": one.field_tools} | message_columns(mappings)


def _template(draft: Draft, file: Axolotl, name: str | None) -> None:
    key = "chat_template" if file.chat_template else "datasets"
    put_template(draft, key, name, "answer")
    if not {"eot_tokens", "special_tokens.eos_token"} & draft.theirs.keys():
        draft.note("eot_tokens", "the end of a turn is supervised; in axolotl only if it is the eos_token")
    if file.train_on_inputs:
        draft.changes("train_on_inputs", "the text of all roles is supervised, without the template's own tokens")


def _format(draft: Draft, file: Axolotl, form: AxolotlFormat) -> bool:
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
    put_template(draft, "datasets", None, "answer")
    write_template(draft, "datasets", "of `format`", parts, "answer")
    draft.remarks["note"] |= table("axolotl")["format_notes"]
    if file.train_on_inputs:
        draft.put("train_on_inputs", "train_on_inputs", assistant_only_loss=False, completion_only_loss=False)
    return True


def _interval(draft: Draft, verb: str, usual: str, per_epoch: float | None, epochs: float | None) -> None:
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
