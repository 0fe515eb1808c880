"""What no table can say of LLaMA-Factory's files: dataset_info.json, templates and adapters."""

from pathlib import Path
from typing import Any

from zero_recipes.config.ds_config import read_json_mapping
from zero_recipes.data.thoughts import DROP, KEEP, MASK_EMPTY
from zero_recipes.tools.imports.datasets import entry_of, message_columns, remark_other_roles
from zero_recipes.tools.imports.draft import Draft
from zero_recipes.tools.imports.models import Factory, FactoryDataset, table, validated
from zero_recipes.tools.imports.rows import remark_nested
from zero_recipes.tools.imports.sharding import put_sharding
from zero_recipes.tools.imports.templates import put_template

INFO = "dataset_info.json"


def put_llama_factory(draft: Draft, file: Factory) -> None:
    """Put into the draft what stands in several of LLaMA-Factory's keys."""
    if file.stage == "pt":
        _pretraining(draft)
    else:
        draft.put(None, "always in LLaMA-Factory", dataset_format="chat")
        put_template(draft, "template", file.template, "turn")
        _thinking(draft, file)
    _adapter(draft, file)
    _data(draft, file)
    put_sharding(draft, file.deepspeed)


def _pretraining(draft: Draft) -> None:
    """Every token of a text has a loss, and no template is used."""
    if draft.theirs.get("template") == "llama3":
        draft.changes("template", "a text ends with the tokenizer's end of text, in LLaMA-Factory with <|end_of_text|>")
    if draft.theirs.get("packing") is not False:
        draft.put("packing", "stage pt", packing=True)
        draft.changes("packing", "packed texts attend only to themselves, and none is continued in the next pack")


def _thinking(draft: Draft, file: Factory) -> None:
    """By enable_thinking: true trains empty blocks of thoughts, null does not, false removes the thoughts too."""
    key = "enable_thinking"
    parts = table("templates")["LLaMA-Factory"].get(file.template, {"think": "maybe: the tokenizer's own template"})
    if key in draft.order:  # also where it is null
        thinking = {True: KEEP, False: DROP, None: MASK_EMPTY}[file.enable_thinking]
        draft.put(key, key, thinking=thinking)
    elif "think" in parts:
        draft.put(None, "LLaMA-Factory's default, enable_thinking: true", thinking=KEEP)


def _adapter(draft: Draft, file: Factory) -> None:
    kind = file.finetuning_type or "lora"
    if kind not in ("lora", "oft"):
        return
    targets = file.oft_target if kind == "oft" else file.lora_target
    names = targets if isinstance(targets, list) else (targets or "all").split(",")
    modules = [name.strip() for name in names]
    modules = ["all-linear" if name == "all" else name for name in modules]
    draft.put(f"{kind}_target", f"{kind}_target", lora_target_modules=modules)
    if file.loraplus_lr_ratio and any("embed" in name or name == "wte" for name in modules):
        draft.changes("lora_target", "LoRA+ gives one of the two matrices of an embedding the usual learning rate")
    if kind == "lora":
        rank = 8 if file.lora_rank is None else file.lora_rank
        draft.put(None, "LLaMA-Factory's default, twice the rank", lora_alpha=2 * rank)


def _data(draft: Draft, file: Factory) -> None:
    """By dataset_info.json, or the table's subsets of a repository."""
    infos, folder = _infos(draft, file.dataset_dir)
    names = file.dataset if isinstance(file.dataset, list) else (file.dataset or "").split(",")
    entries = []
    for name in filter(None, map(str.strip, names)):
        entry = None
        if name in infos:
            described_in = folder / INFO
            model = FactoryDataset
            info = validated(model, infos[name], described_in, draft.source, within=name)
            entry = _entry(draft, name, info, folder, file)
        if entry is None:
            draft.changes(
                "dataset",
                f"{name!r} is no file and no name of the Hub that a dataset_info.json here gives: "
                "write its path under `datasets`",
            )
            # no name of the Hub: another's rows could have it
            entry = entry_of(f"./{name}", {}, {"split": _first_rows(None, file.max_samples)})
        entries.append(entry)
    draft.put("dataset", "dataset, by dataset_info.json", datasets=entries)


def _infos(draft: Draft, named: str | dict[str, Any] | None) -> tuple[dict[str, Any], Path]:
    """(what dataset_info.json says of each data set, the folder that its files are in)."""
    if isinstance(named, dict):
        return named, Path()
    repository = (named or "data").removeprefix("REMOTE:")
    subsets = table("LLaMA-Factory")["remote"]
    if repository in subsets:
        draft.loses("dataset_dir", f"subsets of {repository} by their names: its dataset_info.json is not read")
        return {name: {"hf_hub_url": repository, "subset": name} for name in subsets[repository]}, Path()
    path = draft.find(f"{repository}/{INFO}")
    if path is None:
        return {}, Path(repository)
    return read_json_mapping(path), path.parent


def _entry(draft: Draft, name: str, info: FactoryDataset, folder: Path, file: Factory) -> dict[str, Any] | None:
    """None where the rows are neither a file nor on the Hub."""
    known = table("LLaMA-Factory")
    remark_nested(draft, f"dataset.{name}", info.keys_set(), known["dataset"])
    named = info.columns or {}
    remark_nested(draft, f"dataset.{name}.columns", named, known["column_rows"])
    remark_nested(draft, f"dataset.{name}.tags", info.tags or {}, known["tag_rows"])
    columns: dict[str, str | None] = {}
    if file.stage == "pt":
        columns = {"text": named.get("prompt", "instruction")}
    else:
        for key, new in known["columns"].items():
            columns[new] = named.get(key)
        if info.formatting != "alpaca":
            columns |= _messages(draft, name, info)
    path = info.hf_hub_url
    if path is None and info.file_name is not None:
        path = str(folder / info.file_name)
    if path is None:
        return None
    split = _first_rows(info.split, file.max_samples)
    return entry_of(path, columns, {"split": split, "name": info.subset})


def _first_rows(split: str | None, count: int | None) -> str | None:
    """A split as `datasets` takes it. `count`: of rows."""
    return f"{split or 'train'}[:{count}]" if count else split


def _messages(draft: Draft, name: str, info: FactoryDataset) -> dict[str, str | None]:
    """The columns of a conversation, and what its messages call their parts."""
    tags = info.tags or {}
    mappings = {"role": "from", "content": "value"}
    if "role_tag" in tags and "content_tag" in tags:
        mappings = {"role": tags["role_tag"], "content": tags["content_tag"]}
    elif info.formatting == "openai":
        mappings = {}
    speakers = table("LLaMA-Factory")["speakers"]
    roles = {role: tags.get(tag) for tag, role in speakers.items()}
    remark_other_roles(draft, f"dataset.{name}.tags", roles)
    return message_columns(mappings)
