"""What one step of a mixture asks of a device, by the implementation of its experts.

    python -m benchmarks.experts benchmarks/results/experts.json

A Qwen3-MoE of two layers in one process on a CPU, forward and backward of four batches of one size, with every
implementation that transformers has for all devices. Counted for each batch but the first: kernels, places where the
host waits for a result, and shapes that no earlier batch has had (what a compiler or a captured graph would have to
make anew). The program itself waits once a batch, for the loss. Nothing is timed: a CPU has no kernel for grouped
products. docs/performance.md says what of it holds on a GPU.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers.step_costs import Costs
from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import hardware_facts, library_versions

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
EXPERTS = (8, 64)
BATCHES = 4
ROWS = 2
TOKENS = 32  # of a row
SIZES = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 4, "initializer_range": 0.2}


class Shapes(TorchDispatchMode):
    """Remembers the shapes that operators work on while it is entered, and the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # elements
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        shapes = [tuple(one.shape) for one in arguments if isinstance(one, torch.Tensor)]
        self.seen.add((function, *shapes))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def draw_batches() -> list[torch.Tensor]:
    """Batches of one size; each token goes to experts of its own."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, TOKENS)
    return [torch.randint(SIZES["vocab_size"], shape, generator=generator) for _ in range(BATCHES)]


def count(model: torch.nn.Module, implementation: str) -> dict[str, Any]:
    """Count forward and backward of all batches; the first one only warms up."""
    model.set_experts_implementation(implementation)
    losses = []
    norms = []
    steps = []
    new_shapes = []
    known: set[tuple] = set()
    for batch in draw_batches():
        costs = Costs()
        with costs.counted():
            losses.append(step(model, batch))
        norms.append(torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None).item())
        steps.append(costs)
        shapes = Shapes()
        with shapes:
            step(model, batch)
        new_shapes.append(len(shapes.seen - known))
        known |= shapes.seen
    return {
        "losses": losses,
        "gradient_norms": norms,
        "kernels": _range(costs.kernels for costs in steps[1:]),
        "waits": _range(sum(costs.waits.values()) for costs in steps[1:]),
        "waits_at": sorted(steps[-1].waits),
        "new_shapes": _range(new_shapes[1:]),
        "largest_tensor_elements": shapes.largest,
    }


def step(model: torch.nn.Module, batch: torch.Tensor) -> float:
    """Forward and backward. Returns the loss."""
    model.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss.detach().item()


def _range(numbers) -> list[int]:
    values = list(numbers)
    return [min(values), max(values)]


def measure() -> dict[str, Any]:
    """{"8 experts, all weights": {"eager": what `count` gives, ...}, ...}."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for experts in EXPERTS:
        torch.manual_seed(0)
        whole = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=experts))
        adapter = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
        adapted = get_peft_model(copy.deepcopy(whole), adapter)
        for how, model in (("all weights", whole), ("LoRA on all-linear", adapted)):
            name = f"{experts} experts, {how}"
            found[name] = {one: count(model, one) for one in IMPLEMENTATIONS}
            print(name, {one: values["kernels"] for one, values in found[name].items()}, flush=True)
    return found


def main(out: Path) -> None:
    """Write the counts, with the hardware and the versions."""
    default = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=8)).get_experts_implementation()[""]
    document = {"hardware": hardware_facts("cpu"), "versions": library_versions(), "default": default}
    write_json(out, document | {"sizes": SIZES | {"rows": ROWS, "tokens": TOKENS}, "counts": measure()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
