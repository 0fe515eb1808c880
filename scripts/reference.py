"""Write what the reference pages take from the code: python scripts/reference.py

docs/codes.md from core/findings.yaml; docs/library_faults.md from the docstrings in engine/faults and engine/speed;
docs/models.md from the board of benchmarks/families.py; the table of docs/demo.md from docs/demo/report.json; the
tables of docs/plan.md from planners.json, blind.json and scenarios.json; the table of docs/metrics.md and
docs/metrics.schema.json from the models of metrics.json; the table of docs/recipe.md and recipes/schema.json from the
dataclasses that parse a recipe; the table of docs/recipes.md from the recipes, and recipe_plans.json, gpu_h200.json and
rehearsals.json; benchmarks/rehearsals.md and the table of docs/performance.md from rehearsals.json and throughput.json;
in all pages, the numbers with a marker (scripts/page_numbers.py). Other JSON files are in benchmarks/results.
Exits 1 where a file changed.
"""

import dataclasses
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.demo_page import demo_rows  # noqa: E402
from scripts.library_faults import Fault, read_faults  # noqa: E402
from scripts.models_page import models_page  # noqa: E402
from scripts.page_numbers import with_numbers  # noqa: E402
from scripts.plan_page import tables as plan_tables  # noqa: E402
from zero_recipes.config import keys  # noqa: E402
from zero_recipes.config.keys import UNTYPED, accepted_types  # noqa: E402
from zero_recipes.config.recipe_arguments import RecipeArguments  # noqa: E402
from zero_recipes.core import findings  # noqa: E402
from zero_recipes.core.measured_on import version_of  # noqa: E402
from zero_recipes.metrics import schema  # noqa: E402
from zero_recipes.metrics.schema import Metrics  # noqa: E402

DOCS = ROOT / "docs"
CODES = """# Codes

`zero-recipes check RECIPE.yaml` prints every problem of a run. `run_sft.py` refuses errors with exit code 2 before it
loads weights. `zero-recipes explain ZR104` prints cause, fix and an example. The first digit of a code is its area:
open it, or search for the code at the top of the site. "Can be ignored": `ignore: [ZR608]` in a recipe makes the error
a warning. <Angle brackets> stand for values of the run.
"""
FAULTS = """# Faults of libraries

What was found wrong in DeepSpeed, TRL, transformers, accelerate, PEFT, datasets, torch and bitsandbytes, in the
versions named, and what zero-recipes does about it. Each fault begins with what you see.

To see a fault with the libraries alone, write its program into a file and run `torchrun --nproc_per_node 1 FILE`, or
with 2 where it needs two processes. It ends without an error where the fault is there. Programs for CPUs are run by
`make canary` with the newest releases. Those that need a GPU, a model or rows are for reading.
"""
SLOW = """
## Slow, not wrong

Results are the same with and without these changes. [What a step asks of the device](../benchmarks/step_costs.md) has
what some of them bring.
"""
LIBRARY = re.compile(r"^[A-Za-z]+")
PAGE = re.compile(r"\bdocs/(\w+\.md)")  # a page as the code names it
ISSUE = re.compile(r"\b([\w-]+/[\w-]+)#(\d+)")
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
MEASURED_AS = {"pythia": "pythia-6.9b", "pythia-410m": "pythia-410m"}  # recipe: model of gpu_h200.json
REHEARSED = {  # phase that is timed: its column
    "rows": "rows",
    "model": "model",
    "longest rows": "longest",
    "training": "train",
    "evaluation": "eval",
    "samples": "samples",
    "checkpoints, model": "save",
    "kill": "kill",
    "resume": "resume",
    "resume on half": "on half",
}
FIELDS = yaml.safe_load(Path(schema.__file__).with_name("fields.yaml").read_text())
YAML_TYPES = ("boolean", "integer", "number", "string", "array", "object")
PYTHON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def main() -> int:
    files = {
        DOCS / "codes.md": codes(),
        DOCS / "library_faults.md": library_faults(),
        DOCS / "models.md": models_page(),
        DOCS / "metrics.md": with_table((DOCS / "metrics.md").read_text(), list(metrics_rows(Metrics))),
        DOCS / "metrics.schema.json": metrics_schema(),
        DOCS / "recipe.md": with_table((DOCS / "recipe.md").read_text(), list(key_rows())),
        DOCS / "demo.md": with_table((DOCS / "demo.md").read_text(), list(demo_rows())),
        DOCS / "plan.md": with_tables((DOCS / "plan.md").read_text(), plan_tables()),
        DOCS / "recipes.md": with_table((DOCS / "recipes.md").read_text(), list(recipe_rows())),
        DOCS / "performance.md": with_table(
            (DOCS / "performance.md").read_text(), list(throughput_rows()), ": throughput"
        ),
        BENCHMARKS / "rehearsals.md": with_table((BENCHMARKS / "rehearsals.md").read_text(), list(rehearsal_rows())),
        ROOT / "recipes" / "schema.json": recipe_schema(),
    }
    for path in [*DOCS.glob("*.md"), *BENCHMARKS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        try:
            files[path] = with_numbers(files.get(path) or path.read_text())
        except ValueError as error:
            raise SystemExit(f"{path.relative_to(ROOT)}: {error}") from None
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.write_text(files[path])
        print(f"written: {path.relative_to(ROOT)}")
    return int(bool(changed))


def with_table(page: str, lines: list[str], name: str = "") -> str:
    """The page with the lines between the two marks of this name."""
    table = PAGE.sub(r"[\1](\1)", "\n".join(["", *lines, "", ""]))
    pattern = rf"(<!-- made by scripts/reference.py{name} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: found[1] + table + found[2], page, flags=re.DOTALL)


def with_tables(page: str, tables: dict[str, list[str]]) -> str:
    """The page with the lines of each table between the marks of its name."""
    for name, lines in tables.items():
        page = with_table(page, lines, name)
    return page


def codes() -> str:
    """The codes by area. An area opens at a click: nobody reads all of them."""
    areas: dict[str, dict[str, str]] = {}
    for code, row in sorted(findings.table().items(), key=lambda item: by_area(item[0])):
        described = findings.described(code)
        area = described["area"][:1].upper() + described["area"][1:]
        notes = [
            row.get("level") == "warning" and "Warning.",
            row.get("ignore") and "Can be ignored.",
        ]
        what = escaped(" ".join(described["what"].split()))
        text = f"##### {code}\n\n{' '.join([what + '.', *filter(None, notes)])}\n"
        areas.setdefault(area, {})[code] = text
    page = [escaped(CODES)]
    for area, texts in areas.items():
        head = f"{len(texts)} codes, from {next(iter(texts))} on"
        page += [f'\n## {area}\n\n<details markdown="1"><summary markdown="span">{head}</summary>\n\n']
        page += ["\n".join(texts.values()), "\n</details>\n"]
    return "".join(page)


def by_area(code: str) -> tuple[str, int]:
    """To sort codes: ZR2001 belongs to area 2, and comes after ZR299."""
    return code[2], int(code[2:])


def library_faults() -> str:
    """A table of all faults, then each with its program, by library; then what is slow."""
    by_library: dict[str, list[Fault]] = {}
    for fault in read_faults("faults"):
        library = LIBRARY.match(fault.library)[0]
        by_library.setdefault(library, []).append(fault)
    rows = ["| library | what you see | upstream |\n| --- | --- | --- |\n"]
    texts = []
    for library, faults in sorted(by_library.items(), key=lambda entry: entry[0].lower()):
        texts.append(f"\n## {library}\n")
        for fault in faults:
            issues = " ".join(issue_links(fault.upstream))
            if fault.upstream.startswith("none found"):  # those that it names are of something else
                issues = "none found"
            rows.append(f"| {library} | [{fault.symptom}](#{fault.name}) | {issues} |\n")
            texts.append(fault_text(fault))
    slow = [f"\n- {fault.symptom} **Here:** {fault.here} ({fault.library})" for fault in read_faults("speed")]
    return "".join([FAULTS, "\n", *rows, *texts, SLOW, *slow, "\n"])


def fault_text(fault: Fault) -> str:
    """A fault's part of the page."""
    upstream = ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", fault.upstream)
    parts = [
        f"\n### {fault.symptom} {{ #{fault.name} }}",
        fault.what,
        f"- **Library:** {fault.library}\n- **Upstream:** {upstream}.\n- **Here:** {fault.here}"
        f" (`zero_recipes/engine/faults/{fault.name}.py`)\n- **To see it:** {fault.needs}.",
        f"```python\n{fault.program}\n```\n",
    ]
    return "\n\n".join(parts)


def issue_links(text: str) -> list[str]:
    """Links to the issues that a text names: deepspeedai/DeepSpeed#7533."""
    return [f"[{name}#{number}](https://github.com/{name}/issues/{number})" for name, number in ISSUE.findall(text)]


def escaped(text: str) -> str:
    """Angle brackets as text: Markdown takes them for HTML, but not within backticks."""
    parts = text.split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def described(model: type[BaseModel], name: str) -> dict[str, str]:
    """A field's row of fields.yaml: "meaning" and, where they apply, "unit" and "null"."""
    rows = (FIELDS.get(cls.__name__, {}) for cls in model.__mro__)
    return next(row[name] for row in rows if name in row)


def metrics_schema() -> str:
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Metrics.model_json_schema()
    for name, part in {"Metrics": found, **found["$defs"]}.items():
        for key, written in part["properties"].items():
            row = described(getattr(schema, name), "schema_version" if key == "schema" else key)
            written |= {"description": row["meaning"]} | {word: row[word] for word in ("unit", "null") if word in row}
    return json.dumps(found | {"title": "metrics.json of zero-recipes"}, indent=1) + "\n"


def metrics_rows(model: type[BaseModel]) -> Iterator[str]:
    """A row for each top-level key, with the names of the keys inside; the schema describes those."""
    yield "| key | type | meaning |\n| --- | --- | --- |"
    for name, field in model.model_fields.items():
        more = described(model, name)
        kind, nested = metrics_type(field.annotation)
        kind += f", {more['unit']}" if more.get("unit") else ""
        meaning = more["meaning"] + (f"; null {more['null']}" if "null" in more else "")
        inside = [inner.alias or key for key, inner in nested.model_fields.items()] if nested else []
        meaning += f" ({', '.join(inside)})" if inside else ""
        yield f"| `{field.alias or name}` | {kind} | {meaning} |"


def metrics_type(hint: Any) -> tuple[str, type[BaseModel] | None]:
    """A type in words, and the model in it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return metrics_type(next(part for part in inside if part is not type(None)))
    if origin is typing.Annotated:
        return metrics_type(inside[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside), None
    if origin is list:
        kind, nested = metrics_type(inside[0])
        return f"list of {kind}s", nested
    if origin is dict and inside[1] is Any:
        return "object", None
    if origin is dict:
        return f"object of {metrics_type(inside[1])[0]}s", None
    return ("object", hint) if issubclass(hint, BaseModel) else (PYTHON_TYPES[hint], None)


def key_rows() -> Iterator[str]:
    """The recipe's own keys; TRL's are documented by TRL."""
    yield "| key | default | meaning |\n| --- | --- | --- |"
    for field in dataclasses.fields(RecipeArguments):
        default = "unset" if field.default is None else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        meaning = " ".join(str(field.metadata.get("help", "")).replace("%%", "%").split())
        yield f"| `{field.name}` | {default} | {meaning} |"


def recipe_rows() -> Iterator[str]:
    """A row for each recipe: its planned memory, the peak that one H200 had, and how long its rehearsal took."""
    yield "| recipe | planned, GB per GPU | method | data | measured, GB | rehearsed, s |"
    yield "| --- | --- | --- | --- | --- | ---: |"
    runs = json.loads((RESULTS / "gpu_h200.json").read_text())["rows"]
    plans = json.loads((RESULTS / "recipe_plans.json").read_text())["plans"]
    rehearsals = json.loads((RESULTS / "rehearsals.json").read_text())["rehearsals"]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        rehearsal = rehearsals.get(path.stem)
        cells = [
            f"[`{path.stem}`](../recipes/{path.name})<br>{recipe['model_name_or_path'].removeprefix('./')}",
            "<br>".join(map(planned, plans.get(path.stem, []))),
            method(recipe),
            ", ".join(map(name_of_data, recipe.get("datasets") or [{"path": recipe["dataset_name"]}])),
            measured(runs, path.stem),
            f"{rehearsal['seconds']:.0f}" if rehearsal else "",
        ]
        yield f"| {' | '.join(cells)} |"


def name_of_data(entry: dict) -> str:
    """Of an entry of a recipe's `datasets`: the last part of its name on the Hub, or its folder."""
    return entry["path"].removeprefix("./").rpartition("/")[2]


def rehearsal_rows() -> Iterator[str]:
    """A row for each rehearsal: seconds of the whole and of its phases. Then the phases that failed, in a line."""
    found = json.loads((RESULTS / "rehearsals.json").read_text())["rehearsals"]
    yield f"| recipe | strategy | all | CPU | {' | '.join(REHEARSED.values())} |"
    yield f"| --- | --- |{' ---: |' * (2 + len(REHEARSED))}"
    failed = []
    for name, rehearsal in sorted(found.items()):
        phases = rehearsal["phases"]
        rows = [phases[phase] for phase in REHEARSED]
        seconds = [row["seconds"] if row["result"] == "ok" else None for row in rows]
        whole = [rehearsal["strategy"], f"{rehearsal['seconds']:.0f}", f"{rehearsal['cpu_seconds']:.0f}"]
        cells = [f"`{name}`", *whole, *("" if each is None else f"{each:.1f}" for each in seconds)]
        yield f"| {' | '.join(cells)} |"
        failed += [f"{phase} of {name}" for phase, row in phases.items() if row["result"] not in ("ok", "left out")]
    yield f"\nPhases that failed: {', '.join(failed) or 'none'}."


def throughput_rows() -> Iterator[str]:
    """A row for each strategy: tokens/s of trl sft, tuned trl sft and the recipe, and the recipe's ratios to others."""
    yield (
        "| strategy | trl sft, tokens/s | tuned trl sft | recipe | recipe / tuned trl sft | / trl sft |"
        " / faster bare loop | / DDP |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    workloads = json.loads((RESULTS / "throughput.json").read_text())["workloads"]
    for strategy, measured in sorted(workloads["12M, Alpaca"]["strategies"].items()):
        speeds = {name: program["tokens_per_second"] for name, program in measured["programs"].items()}
        ratios = {name.removeprefix("recipe/"): ratio for name, ratio in measured["ratios"].items()}
        loops = [ratio for name, ratio in ratios.items() if name not in ("trl", "trl_tuned", "ddp")]
        faster_loop = min(loops or [ratios["ddp"]])
        cells = [f"{speeds[name]:,.0f}" for name in ("trl", "trl_tuned", "recipe")]
        cells += [f"{ratio:.2f}" for ratio in (ratios["trl_tuned"], ratios["trl"], faster_loop, ratios["ddp"])]
        yield f"| {strategy} | {' | '.join(cells)} |"


def planned(row: dict) -> str:
    """ "2 x h100-80gb, zero3: 69.8 to 94.1": GB of each GPU. An asterisk: from formulas."""
    note = "" if row["source"] == "engine" else " \\*"
    peaks = f"{row['low_bytes'] / 1e9:.1f} to {row['high_bytes'] / 1e9:.1f}"
    return f"{row['gpus']} x {row['gpu']}, {row['strategy']}: {peaks}{note}"


def method(recipe: dict) -> str:
    adapted = "QLoRA" if recipe.get("load_in_4bit") else "LoRA"
    return adapted if recipe.get("use_peft") else "full"


def measured(runs: list[dict], recipe: str) -> str:
    """The allocated peaks of runs on one GPU with the recipe's own keys, in GB: "" where there are none."""
    peaks = {}
    for run in runs:
        is_own = run["model"] == MEASURED_AS.get(recipe) and run["keys"].keys() <= {"max_steps"}
        if is_own and run["world_size"] == 1 and run["status"] == "ok":
            peaks[run["strategy"]] = run["measured"]["allocated_peak_bytes"] / 1e9
    if len(peaks) > 1:
        return f"{min(peaks.values()):.1f} to {max(peaks.values()):.1f}, [by strategy](plan.md#on-a-gpu)"
    return "".join(f"{strategy}: {peak:.1f}" for strategy, peak in peaks.items())


def recipe_schema() -> str:
    """With which editors complete a recipe: one property a key, no others."""
    properties = {"env": {"type": "object", "description": "Environment variables, set before anything is imported."}}
    hints = keys.key_types()
    for cls in keys.dataclasses_of_a_recipe():
        for field in dataclasses.fields(cls):
            if field.init:
                properties[field.name] = property_of(field, hints[field.name])
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of zero-recipes: TRL's keys and a few of our own",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "x-versions": {library: version_of(library) for library in ("transformers", "trl")},
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


def property_of(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Types, choices, default and help of one key."""
    described: dict[str, Any] = {}
    takes = accepted_types(hint)
    if "any" not in takes and field.name not in UNTYPED:
        names = [name for name in YAML_TYPES if name in takes]
        if names == ["number"]:
            names = ["number", "string"]  # YAML reads 1e-5 as text, TRL as a number
        described["type"] = [*names, "null"]
    enums = [part for part in typing.get_args(hint) if isinstance(part, type) and issubclass(part, Enum)]
    choices = field.metadata.get("choices") or [member.value for part in enums for member in part]
    if choices:
        described["enum"] = [*choices, None]
    if field.default is not dataclasses.MISSING and isinstance(field.default, (bool, int, float, str)):
        described["default"] = field.default.value if isinstance(field.default, Enum) else field.default
    if "help" in field.metadata:
        described["description"] = " ".join(str(field.metadata["help"]).replace("%%", "%").split())
    return described


if __name__ == "__main__":
    sys.exit(main())
