"""What `zero-recipes check --data` passes takes a step; what it refuses, a run refuses by the same codes.

Data of every form, sound or with one value spoiled, for models with chat templates of several kinds.
"""

import contextlib
import copy
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.helpers import ending_cases
from tests.helpers.bad_data import CHATML, lines, parquet
from tests.helpers.drawn_rows import TEMPLATE, alpaca, conversations, pairs, prompts_and_completions, texts
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, llama_config, write_model
from zero_recipes.core.findings import Finding
from zero_recipes.tools import check
from zero_recipes.tools import main as cli

STORIES = ROOT.parent / "shared" / "fixtures" / "stories260K"  # beside some checkouts only
WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
)
TRIMMED = TEMPLATE.replace("m['content']", "m['content'] | trim")
OF_QWEN = (  # its special tokens are not in the vocabulary of the tiny world
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "own": TEMPLATE,
    "marked": CHATML,
    "without_system": WITHOUT_SYSTEM,
    "alternating": ALTERNATING,
    "trimmed": TRIMMED,
    "of_qwen": OF_QWEN,
}
RECIPE = {
    "random_weights": True,
    "output_dir": "out",
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "activation_checkpointing": False,
    "logging_steps": 1,
    "sample_max_new_tokens": 2,
    "save_strategy": "no",
    "save_model": False,
    "report_to": "none",
}
EXAMPLES = 5  # fewer than 11: from then on hypothesis draws each of them six times, a little changed
SPOILED = [None, 5, "", "  ", [], ["a"], {}, 0.5, ...]  # Ellipsis takes the value out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """{name: keys of a recipe}."""
    folder = tmp_path_factory.mktemp("models")
    base = write_model(folder / "base")
    found = {"base": {"model_name_or_path": str(base)}}
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        llama_config().save_pretrained(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
        found[name] = {"model_name_or_path": str(folder / name)}
        found[f"base, {name}"] = found["base"] | {"chat_template_path": str(folder / f"{name}.jinja")}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder / "added")
    found["base, added"] = found["base"] | {"chat_template_path": str(folder / "added")}
    return found


# what is drawn


def of(*values: Any) -> st.SearchStrategy:
    return st.sampled_from(values)


@st.composite
def token_ids(draw) -> list[dict[str, Any]]:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.integers(2, 400) | of(1300), min_size=1, max_size=20))  # some that the models lack
        labels = [draw(st.sampled_from([-100, token])) for token in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


@st.composite
def data_sets(draw) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(rows, keys of a recipe that they need, what they hold: "ids", "turns" or "texts")."""
    if draw(st.integers(0, 9)) == 9:
        return draw(token_ids()), {}, "ids"
    examples = draw(conversations() | pairs() | alpaca() | prompts_and_completions() | texts())
    rows = [example.row for example in examples]
    if draw(st.integers(0, 4)) == 4:
        rows = copy.deepcopy(rows)
        holder, key = draw(st.sampled_from(list(places_of(draw(st.sampled_from(rows))))))
        value = draw(st.sampled_from(SPOILED))
        if value is ...:
            del holder[key]
        else:
            holder[key] = value
    return rows, examples[0].keys, "texts" if examples[0].turns is None else "turns"


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """(what holds a value, by what key or number) of all values in a row."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places_of(value[key])


KEYS = {
    "assistant_mask": of("turn", "answer", "template"),
    "completion_only_loss": of(True, False),
    "dataloader_drop_last": of(True),
    "dataset_num_proc": of(2),
    "dataset_streaming": of(True),
    "eval_packing": of(True, False),
    "eval_strategy": of("steps"),
    "long_rows": of("drop"),
    "loss_type": of("dft"),
    "max_length": of(None, 2, 6, 16, 40),
    "packing": of(True),
    "packing_strategy": of("bfd_split", "wrapped"),
    "pad_to_multiple_of": of(8),
    "padding_free": of(True),
    "per_device_train_batch_size": of(1),
    "thinking": of("keep", "last", "drop"),
    "sample_prompts": of(1, ["Say red."]),
    "shuffle_dataset": of(True),
    "train_sampling_strategy": of("group_by_length", "sequential"),
    "truncation_mode": of("keep_end"),
    "use_peft": of(True),
}
KEYS_OF = {  # of what rows hold
    "turns": {"assistant_only_loss": of(True, True, False)},
    "texts": {"completion_only_loss": of(True, False)},
    "ids": {"dataset_kwargs": of({"skip_prepare_dataset": True})},
}


@st.composite
def cases(draw, models: dict[str, dict[str, Any]]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """({name of a file: content}, a recipe)."""
    rows, keys, kind = draw(data_sets())
    drawn = {}
    for key in draw(st.lists(st.sampled_from([*KEYS]), max_size=6, unique=True)):
        drawn[key] = draw(KEYS[key])
    for key, values in KEYS_OF[kind].items():
        if draw(st.booleans()):
            drawn[key] = draw(values)
    recipe = RECIPE | models[draw(st.sampled_from([*models]))] | drawn | keys
    if "eval_strategy" in drawn:
        recipe["eval_steps"] = 1
    ending, content = draw(st.sampled_from([*files_of(rows).items()]))
    files = {f"data/train.{ending}": content}
    mixes = draw(st.integers(0, 4))
    if mixes == 4:
        recipe["datasets"] = [{"path": "data"}]
        recipe["test_split_size"] = draw(of(None, 1, 0.5))
        if draw(st.booleans()):
            others, keys, _ = draw(data_sets())
            files["others/train.jsonl"] = lines(others)
            recipe["datasets"].append({"path": "others"} | {key: value for key, value in keys.items() if value})
        recipe["streaming"] = recipe.pop("dataset_streaming", False)
    else:
        recipe["dataset_name"] = "data"
        if draw(st.booleans()) or not {"eval_strategy", "sample_prompts"}.isdisjoint(drawn):
            files[f"data/test.{ending}"] = content
            if draw(st.integers(0, 3)) == 3:  # other columns, other faults
                files = {"data/train.jsonl": lines(rows), "data/test.jsonl": lines(draw(data_sets())[0])}
    return files, recipe


def files_of(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """{ending: content} of the kinds of files that can hold the rows."""
    found = {"jsonl": lines(rows)}
    with contextlib.suppress(Exception):  # pyarrow has errors of many kinds for values of several types
        found["parquet"] = parquet(rows)
    if all(isinstance(value, str | int | None) for row in rows for value in row.values()):
        table = io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(table, names)
        writer.writeheader()
        writer.writerows(rows)
        found["csv"] = table.getvalue().encode()
    return found


# what check says


@pytest.fixture
def checked(monkeypatch, capsys) -> Callable[[Path], list[str]]:
    """A function: the codes of the errors that the command finds in a folder's recipe."""
    found: list[Finding] = []
    show = check.shown

    def shown(findings: list[Finding], *how) -> str:
        found.extend(findings)
        return show(findings, *how)

    monkeypatch.setattr(check, "shown", shown)

    def codes(folder: Path) -> list[str]:
        found.clear()
        kept = dict(os.environ)
        try:
            with chdir(folder):
                code = cli.main(["check", "recipe.yaml", "--data", "--num_processes", "1"])
        finally:
            os.environ.clear()
            os.environ.update(kept)
            capsys.readouterr()
        errors = [finding.code for finding in found if finding.level == "error"]
        assert code == (2 if errors else 0), code
        return errors

    return codes


@pytest.mark.parametrize("number", [0, *map(grid, range(1, 25))])
def test_what_check_passes_takes_a_step(one, models, checked, tmp_path, number):
    assert_agree(one, models, checked, tmp_path, number)


@pytest.mark.grid
@pytest.mark.skipif(not STORIES.is_dir(), reason="no stories260K beside this checkout")
@pytest.mark.parametrize("number", range(4))
def test_what_check_passes_takes_a_step_of_a_sentencepiece_model(one, checked, tmp_path, number):
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    bare = {"model_name_or_path": str(STORIES), "random_weights": False}
    models = {"stories": bare, "stories, own": bare | {"chat_template_path": str(tmp_path / "own.jinja")}}
    assert_agree(one, models, checked, tmp_path, number)


def assert_agree(
    one, models: dict[str, dict], checked: Callable[[Path], list[str]], tmp_path: Path, number: int
) -> None:
    """`check --data` and a run of one step, over EXAMPLES cases. `number`: hypothesis's seed."""
    wrong = []
    folders = iter(range(10**6))

    @seed(number)
    @settings(max_examples=EXAMPLES, phases=[Phase.generate])
    @given(cases(models))
    def look(case):
        files, recipe = case
        folder = tmp_path / str(next(folders))
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        try:
            errors = checked(folder)
            ending = one.run(ending_cases.losses_or_codes, folder=str(folder), argv=["recipe.yaml"])[0]
            assert_ends_so(errors, ending)
        except (Exception, SystemExit) as error:
            changed = {key: value for key, value in recipe.items() if key not in RECIPE}
            shown = json.dumps(changed), [*files], str(files)[:1500]
            wrong.append(f"{shown}\n{type(error).__name__}: {str(error)[-1500:]}")

    look()
    assert wrong == [], f"{len(wrong)} of {EXAMPLES}\n" + "\n\n".join(wrong)


def assert_ends_so(errors: list[str], ending: dict[str, list]) -> None:
    """`errors`: codes by `check`; `ending`: of the run."""
    refused = ending.get("codes", [])
    if errors:
        assert refused and {*refused} <= {*errors}, (refused, errors)
    else:
        assert ending.get("losses"), ending
        assert all(map(math.isfinite, ending["losses"])), ending
