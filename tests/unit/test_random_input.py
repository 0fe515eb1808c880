"""Whatever a recipe, a ds_config or an accelerate file holds: `check` ends with findings; what it accepts trains."""

import dataclasses
import enum
import json
import math
import os
import random
import typing
from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import ending_cases
from tests.helpers.seeded import count, draw, grid
from tests.helpers.tiny import ROOT, named, write_recipe
from tests.helpers.two_ranks import set_by_launch
from zero_recipes.checks.deepspeed_rules import top_level_keys
from zero_recipes.config.accelerate import launched_environment
from zero_recipes.config.keys import dataclasses_of_a_recipe, key_choices, key_types
from zero_recipes.tools import main as cli

# keys of a deepspeed_config that accelerate 1.15 refuses beside deepspeed_config_file (utils/dataclasses.py,
# DeepSpeedPlugin._deepspeed_config_checks)
BESIDE_DS_CONFIG_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
)
KINDS = {"recipe": 200, "ds_config": 150, "accelerate": 150}  # how many of each in the grid


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "number"), [*((kind, 4) for kind in KINDS), *map(grid, KINDS, KINDS.values())])
def test_a_mutated_file_is_refused_or_trains(request, tmp_path, capsys, kind, number):
    """In the grid, what `check` accepts takes a step on two processes, or is refused before the weights are loaded."""
    recipe = json.loads(write_recipe(tmp_path, max_steps=1, output_dir="out").read_text())
    endings, wrong, kept, trains = Counter(), {}, dict(os.environ), number == KINDS[kind]
    for each in range(number):
        folder = tmp_path / str(each)
        options, changed = write_mutated(kind, folder, recipe, draw("mutations", kind, each))
        file = folder / "accelerate.yaml" if kind == "accelerate" else None
        try:
            with chdir(folder):
                code = cli.main(["check", "recipe.yaml", *options, "--num_processes", "2"])
                assert code in (0, 2), code
                endings["refused by check"] += code == 2
                if code == 0 and trains:
                    group = {"1": "one", "2": "two"}[launched_environment(file, 2).get("WORLD_SIZE", "1")]
                    how = {"argv": ["recipe.yaml"], "environment": set_by_launch(file, 2)} if file else {}
                    how = {"argv": ["recipe.yaml", *options], "environment": {}} | how
                    ranks = request.getfixturevalue(group).run(ending_cases.ended, folder=str(folder), **how)
                    assert len(set(ranks)) == 1, ranks
                    endings[ranks[0]] += 1
        except (Exception, SystemExit) as error:
            wrong[each] = f"{changed}: {type(error).__name__} {str(error)[-1500:]}"
        finally:
            os.environ.clear()
            os.environ.update(kept)
            capsys.readouterr()
    assert wrong == {}, "\n\n".join(wrong.values())
    if trains:
        count("mutations", kind, number=number, **endings)


STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload", "ddp", "fsdp2")
OF_TYPE = {bool: [True, False], int: [1, 2, 3, 8], float: [0.0, 0.1, 0.5, 1.0], str: ["x", "no", "cpu", "auto"]}
OF_TYPE |= {dict: [{}, {"a": 1}, {"lr": 0.1}, {"type": "AdamW"}, {"enabled": True}], list: [[], ["x"]]}
WRONG = [None, True, 0, -1, 7, 0.5, "", "auto", "none", "1e-5", "1e400", [], {}, 10**40, math.nan, math.inf, "a\0b"]
OF_KEY = {"optimizer.type": ["AdamW", "Adam", "Lion", "Muon", "OneBitAdam"], "scheduler.type": ["WarmupLR", "OneCycle"]}
OF_KEY |= {"data_types.grad_accum_dtype": ["fp32", "bf16"], "optimizer.params.lr": [0.1, "auto"]}


def keys_of(kind: str) -> dict[str, list]:
    """{dotted key: values that may be right} of a file of that kind, by the libraries' own classes."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.config.config_args import ClusterConfig
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    if kind == "recipe":
        defaults = {field.name: field.default for cls in dataclasses_of_a_recipe() for field in dataclasses.fields(cls)}
        found, choices = dict(key_types()), key_choices()
        del found["ignore"]  # who ignores an error takes what comes
        return {key: [*choices.get(key, ()), *right(hint, defaults.get(key))] for key, hint in found.items()}
    if kind == "accelerate":
        found = {field.name: right(field.type) for field in dataclasses.fields(ClusterConfig)}
        for field in dataclasses.fields(FullyShardedDataParallelPlugin):
            found[f"fsdp_config.fsdp_{field.name.removeprefix('fsdp_')}"] = right(field.type)
        return found | {f"deepspeed_config.{key}": right(int | bool | str) for key in BESIDE_DS_CONFIG_FILE}
    models = {"zero_optimization.": config.DeepSpeedZeroConfig, "bf16.": DeepSpeedBF16Config}
    models |= {"fp16.": DeepSpeedFP16Config, "comms_logger.": CommsLoggerConfig}
    models["zero_optimization.offload_optimizer."] = offload_config.DeepSpeedZeroOffloadOptimizerConfig
    models["zero_optimization.offload_param."] = offload_config.DeepSpeedZeroOffloadParamConfig
    fields = [(block, *field) for block, model in models.items() for field in model.model_fields.items()]
    found = {block + (field.alias or name): right(field.annotation, field.default) for block, name, field in fields}
    return dict.fromkeys(sorted(top_level_keys()), right(int | float | bool | str | dict)) | found | OF_KEY


def right(hint: Any, default: Any = None) -> list:
    """Values of that type, and numbers beside the default."""
    plain = [typing.get_origin(part) or part for part in typing.get_args(hint) or (hint,)]
    found = [member.value for part in plain if isinstance(part, enum.EnumMeta) for member in part]
    found += [each for part in plain for each in OF_TYPE.get(part, [])]
    return found + ([default * 2, default + 1, default / 2, str(default)] if isinstance(default, int | float) else [])


def leaves(document: dict, prefix: str = "") -> dict[str, list]:
    found = {}
    for key, inner in document.items():
        deeper = leaves(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {}
        found |= deeper or {f"{prefix}{key}": right(type(inner), inner)}
    return found


def mutate(document: dict, keys: dict[str, list], chance: random.Random) -> list[str]:
    """Change, add or take out one to three values; what was done."""
    done = []
    for _ in range(chance.randint(1, 3)):
        here = leaves(document)
        path = chance.choice([*(here if chance.random() < 0.4 else keys)])
        *blocks, last = path.split(".")
        inner = document
        for block in blocks:
            inner[block] = inner[block] if isinstance(inner.get(block), dict) else {}
            inner = inner[block]
        inner[last] = chance.choice((keys | here)[path] or WRONG if chance.random() < 0.7 else WRONG)
        done.append(f"{path}={inner[last]!r}")
        if path in here and chance.random() < 0.2:
            del inner[last]
            done[-1] = f"-{path}"
    return done


def write_mutated(kind: str, folder: Path, recipe: dict, chance: random.Random) -> tuple[list[str], list[str]]:
    """(arguments of `check`, what was changed) for `folder`, which is made."""
    folder.mkdir()
    strategy, stage = chance.choice(STRATEGIES), chance.choice(STRATEGIES[:5])
    files = {"recipe": dict(recipe), "ds_config": json.loads((ROOT / f"ds_configs/{stage}.json").read_text())}
    files["accelerate"] = yaml.safe_load((ROOT / f"accelerate_configs/{strategy}.yaml").read_text())
    changed = mutate(files[kind], keys_of(kind), chance)
    for name, document in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(document) if name == "ds_config" else yaml.safe_dump(document))
    ways = {"recipe": named(strategy), "ds_config": ["--deepspeed", "ds_config.yaml"]}
    return ways.get(kind, ["--config_file", "accelerate.yaml"]), [strategy, *changed]
