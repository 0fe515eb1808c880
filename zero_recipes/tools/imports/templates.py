"""The chat template of an imported recipe: config/imports/templates.yaml knows those that have a name of their own."""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from zero_recipes.tools.imports.draft import Draft
from zero_recipes.tools.imports.models import table


def put_template(draft: Draft, key: str, name: str | None, mask: str) -> None:
    """Use the other trainer's template of this name, or the tokenizer's own.

    `key`: of the other trainer, that names it. `mask`: assistant_mask.
    """
    draft.put(key, f"loss, {draft.source}", assistant_only_loss=True, assistant_mask=mask)
    if name in (None, "tokenizer_default"):
        return
    parts = table("templates")[draft.source].get(name)
    if parts is None:
        draft.changes(key, f"the template {name!r} is unknown: the tokenizer's own is used")
    else:
        write_template(draft, key, name, parts, mask)


def write_template(draft: Draft, key: str, name: str, parts: Mapping[str, Any], mask: str) -> None:
    """Write a chat template beside the recipe. `parts`: a row of templates.yaml, which explains them."""
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
