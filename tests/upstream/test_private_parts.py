"""Private attributes of DeepSpeed's optimizers, renamed in a new version, are not counted as 0 bytes."""

import re
from pathlib import Path

import pytest
import torch

from zero_recipes.libs.deepspeed import _LAYOUTS, state_bytes

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
