"""README.md of an output folder, made from the files in it, and the folder's way to the hub.

Neither card nor what is pushed of recipe.resolved.yaml, metrics.json and configurations names a path of this machine.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, ModelCardData, get_session, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load
from jinja2 import Environment, Template
from markupsafe import Markup

from zero_recipes.checkpoint.checksums import (
    CHECKSUMS,
    checksums_document,
    read_checksums,
    saved_files,
    update_records,
)
from zero_recipes.checkpoint.saved_model import ADAPTER
from zero_recipes.core.files import CONFIGS, load_yaml, strict_json, write_text
from zero_recipes.core.findings import first_line
from zero_recipes.core.run_end import RunFailed
from zero_recipes.data.load import on_hub
from zero_recipes.metrics import read_runs, schema
from zero_recipes.training import card_rows

README, RECIPE, SAMPLES, PICTURE = "README.md", "recipe.resolved.yaml", "samples.jsonl", "loss.png"
SECRET = ("hub_token", "output_dir", "logging_dir", "resume_from_checkpoint")  # keys that are nobody else's
HUB_SECONDS = 600  # without a byte of an answer


def write_card(folder: Path, out: Path | None = None) -> None:
    """Write the model card and its picture of the losses, from what a run has written so far.

    `folder`: the run's output folder. `out`: where the model was exported to; None: `folder`.
    """
    run = schema.Metrics.read(folder / schema.FILE)
    recipe = _recipe(folder)
    base = recipe.get("model_name_or_path") or run.model
    named = _data(recipe)
    licence = licence_of(base, "model", run.model_revision)
    out = out or folder
    if run.losses:
        from matplotlib.figure import Figure  # here: no other rank draws, and no run before its end

        figure = Figure((7, 3.2), dpi=120, layout="constrained")
        read_runs.draw_losses(figure.subplots(), run)
        figure.savefig(out / PICTURE)
    data = ModelCardData(
        license=licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=out.resolve().name,
        tags=["zero-recipes", "trl", "sft"],
    )
    if on_hub(base):
        data.base_model = base
    if any(map(on_hub, named)):
        data.datasets = list(filter(on_hub, named))
    if run.strategy.startswith("zero"):
        data.tags.append("deepspeed")
    is_adapter = (out / ADAPTER).is_file()
    adapter = {}
    if is_adapter:
        data.library_name = "peft"
        data.tags.append("lora")
        adapter = json.loads((folder / "adapter_config.json").read_text())
    licences = [(redacted(name), licence_of(name, "dataset") or "unknown") for name in named]
    recipe_text = yaml.safe_dump(redacted(recipe), sort_keys=False, allow_unicode=True)
    samples = read_runs.read_samples(folder / SAMPLES)
    numbers = card_rows.numbers_of(run)
    card = _template().render(
        card_data=data.to_yaml(),
        model_name=data.model_name,
        run=run,
        recipe=recipe_text,
        fence=Markup(_fence(recipe_text, shortest=3)),
        base=redacted(base) or "an unnamed model",
        licence=licence or "unknown",
        method=card_rows.method_of(run, is_adapter),
        data=licences,
        data_names=", ".join(name for name, _ in licences) or "unnamed data",
        facts=card_rows.facts_of(run, adapter),
        numbers=numbers,
        is_planned=any(number.planned for number in numbers),
        losses=card_rows.losses_of(run),
        samples=card_rows.samples_of(samples),
        scores=card_rows.scores_of(samples),
        versions=", ".join(f"{name} {version}" for name, version in (run.versions or {}).items()),
    )
    write_text(out / README, str(ModelCard(card)))


MARKDOWN = re.compile(r"[&<>|`\[\]\\*~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is one


@cache
def _template() -> Template:
    """Whatever it prints is text, unless it says `code` or `safe`: names, versions and answers are other people's."""
    environment = Environment(finalize=_as_text)
    environment.filters["code"] = _as_code
    return environment.from_string((resources.files("zero_recipes.training") / "card.md.j2").read_text())


def _as_text(value: Any) -> str:
    """Shown as it is, in a line or a table's cell: neither HTML nor Markdown."""
    if isinstance(value, Markup):
        return value
    lines = MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", str(value)).splitlines()
    return "<br>".join(lines)


def _as_code(value: Any) -> Markup:
    """A code span, in a line or a table's cell."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    ticks = _fence(text, shortest=1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Markup(f"{ticks}{space}{text}{space}{ticks}")


def _fence(text: str, shortest: int) -> str:
    """So many backticks that none inside ends what they begin."""
    runs = re.findall("`+", text)
    return "`" * max([shortest, *(len(run) + 1 for run in runs)])


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE
    if not path.is_file():
        return {}
    return load_yaml(path.read_text())


def _data(recipe: Mapping[str, Any]) -> list[str]:
    entries = [*(recipe.get("datasets") or []), {"path": recipe.get("dataset_name")}]
    names = []
    for entry in entries:
        files = entry.get("data_files") or entry["path"]
        if isinstance(files, list):
            names += map(str, files)
        elif files:
            names.append(str(files))
    return names


def licence_of(name: str | None, kind: str, revision: str | None = None) -> str | None:
    """The licence of a model or data set, by the README.md in its folder or in the hub's cache; None if unknown.

    `kind`: "model" or "dataset".
    """
    path = Path(str(name)) / README
    if not path.is_file():
        path = try_to_load_from_cache(name, README, repo_type=kind, revision=revision) if on_hub(name) else None
    if not isinstance(path, (str, Path)):  # None, or huggingface_hub's mark of a file that is not there
        return None
    with suppress(OSError, ValueError, yaml.YAMLError):
        found = (metadata_load(path) or {}).get("license")
        if isinstance(found, list):
            return ", ".join(found)
        return found
    return None


def redacted(value: Any) -> Any:
    """The same value without paths of this machine: of each, its last name. Other text stays."""
    if isinstance(value, Mapping):
        return {key: redacted(each) for key, each in value.items() if key not in SECRET}
    if isinstance(value, list):
        return [redacted(each) for each in value]
    if not isinstance(value, str):
        return value
    is_one_word = len(value.split()) == 1 and value == value.strip()
    is_bare = is_one_word and "/" in value and "://" not in value and not on_hub(value)
    if (is_bare or value.startswith(("/", "~/", "./", "../"))) and "\n" not in value:
        return Path(value).name or value
    for folder in (Path.cwd(), Path.home()):
        if len(folder.parts) > 1:
            value = value.replace(f"{folder}/", "")
    return value


class NotPushed(RunFailed):
    """The hub did not take the folder; everything is saved here."""


def hub(token: str | None) -> HfApi:
    """The hub's client, with a limit to its waiting.

    huggingface_hub 1.x (utils/_http.py `default_client_factory`) waits for an answer for ever.
    """
    get_session().timeout = HUB_SECONDS
    return HfApi(token=token)


def push(folder: Path, repo: str, token: str | None = None, revision: str | None = None) -> str:
    """Push a run's model, card, measurements and recipe to the hub, in one commit.

    Checkpoints, logs, failures and pickles stay here. Returns the commit's address. Raises NotPushed.
    """
    write_card(folder)
    update_records(folder, [README, PICTURE])
    names = {*saved_files(folder), README, PICTURE, SAMPLES, schema.FILE, RECIPE, "generation_config.json"}
    contents = {name: _redacted_file(folder / name) for name in sorted(names) if (folder / name).is_file()}
    if (folder / CHECKSUMS).is_file():
        try:
            known = read_checksums(folder)
        except (OSError, ValueError, TypeError) as error:
            raise NotPushed(f"{folder / CHECKSUMS} cannot be read: {first_line(error)}") from error
        pushed = {kind: _of_pushed(sums, contents) for kind, sums in known.items()}
        contents[CHECKSUMS] = strict_json(checksums_document(**pushed), indent=2).encode()
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    try:
        message = "Model, card, measurements and recipe"
        return hub(token).create_commit(repo, operations, commit_message=message, revision=revision).commit_url
    except Exception as error:  # of huggingface_hub and the network, of many kinds
        raise NotPushed(
            f"{folder} is saved, but was not pushed to {repo}: {first_line(error)}. To push it again: "
            f"zero-recipes push {folder} --hub_model_id {repo}"
        ) from error


def _of_pushed(sums: Mapping[str, str], contents: Mapping[str, str | bytes]) -> dict[str, str]:
    """The checksums of the files that are pushed, as they are pushed."""
    pushed = {}
    for name, digits in sums.items():
        content = contents.get(name)
        if isinstance(content, bytes):
            digits = hashlib.sha256(content).hexdigest()
        if content is not None:
            pushed[name] = digits
    return pushed


def _redacted_file(path: Path) -> str | bytes:
    """Its path, or its text without paths of this machine."""
    if path.name == RECIPE:
        return yaml.safe_dump(redacted(_recipe(path.parent)), sort_keys=False, allow_unicode=True).encode()
    if path.name == schema.FILE:
        return strict_json(redacted(json.loads(path.read_text())), indent=2).encode()
    if path.name in CONFIGS:
        document = json.loads(path.read_text())
        named = {key: redacted(text) for key, text in document.items() if key.endswith(("path", "file"))}
        if any(document[key] != text for key, text in named.items()):
            return strict_json(document | named, indent=2).encode()
    return os.fspath(path)
