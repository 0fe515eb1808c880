"""Private parts of libraries: each use has its record, and `make canary` tries what a new version could break.

`python -m tests.upstream.test_private_parts` lists the records.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from zero_recipes.libs.deepspeed import _LAYOUTS, state_bytes

ROOT = Path(__file__).resolve().parents[2]
MOST = 28


def records() -> list[tuple[str, str]]:
    """(file and function, text) of every paragraph of a docstring that begins with "Private:"."""
    found = []
    for path in sorted((ROOT / "zero_recipes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    if paragraph.startswith("Private: "):
                        place = f"{path.relative_to(ROOT)} {getattr(node, 'name', '')}".strip()
                        found.append((place, " ".join(paragraph.split())))
    return found


def test_each_record_names_a_library_with_its_version():
    found = records()
    assert 15 < len(found) <= MOST
    libraries = "DeepSpeed|transformers|TRL|accelerate|datasets|torch|bitsandbytes"
    for place, text in found:
        assert re.search(rf"({libraries}) \d+\.\d+", text), place


# what a renamed attribute must not make 0 bytes

DEEPSPEED = {
    "DeepSpeedZeroOptimizer": "deepspeed.runtime.zero.stage_1_and_2",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.zero.stage3",
    "FP16_Optimizer": "deepspeed.runtime.fp16.fused_optimizer",
    "FP16_UnfusedOptimizer": "deepspeed.runtime.fp16.unfused_optimizer",
    "BF16_Optimizer": "deepspeed.runtime.bf16_optimizer",
}


@pytest.mark.private
@pytest.mark.parametrize("name", DEEPSPEED)
def test_every_tensor_of_a_deepspeed_optimizer_is_counted(name):
    import importlib

    module = importlib.import_module(DEEPSPEED[name])
    source = Path(module.__file__).read_text()
    layout = _LAYOUTS[name]
    made = object.__new__(getattr(module, name))
    made.partition_gradients, made.ipg_buckets = False, {}
    made.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for attribute in (name for part in layout for name in part):
        assert re.search(rf"self\.{attribute}\b", source), attribute
        with pytest.raises(AttributeError, match=attribute):  # a renamed one
            state_bytes(torch.nn.Module(), [], made, False, False)
        setattr(made, attribute, [torch.zeros(16)])
    counted = state_bytes(torch.nn.Module(), [], made, False, False)
    found = [counted[part] for part in ("params", "grads", "optimizer")]
    assert found == [64 * len(attributes) for attributes in layout]


def test_an_optimizer_that_is_not_known_is_not_counted_as_0_bytes():
    class Unknown:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    with pytest.raises(TypeError, match="Unknown is none of DeepSpeedZeroOptimizer"):
        state_bytes(torch.nn.Module(), [], Unknown(), False, False)


if __name__ == "__main__":
    for place, text in records():
        print(f"{place}\n    {text.removeprefix('Private: ')}")
