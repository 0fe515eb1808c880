"""What one step asks of a device, with each change to it on and off: operators, collectives, bytes, waits, and time.

    python -m benchmarks.step_costs OUT.json

For CPUs: one process, a GPT-NeoX of 24 layers of width 32, one row of the demo a step, through run_sft.py.
The tensors are so small that the host decides the time, as it does for small batches on a GPU. The variants run in
this order, in the reverse, and both once more: the machine's speed changes, so the least of all steps is the most
certain. docs/performance.md says what of it holds on a GPU.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, GPTNeoXConfig

from tests.helpers import step_costs
from tests.helpers.group import Group
from tests.helpers.tiny import ROOT, named, write_recipe
from zero_recipes.core.measured_on import hardware_facts, library_versions

STEPS = 24
UNTIMED = 3
ORDERS = 4
CLOCKS = ("milliseconds", "processor_milliseconds")
VARIANTS = {  # name: strategy, what is off, keys
    "DDP": ("single", [], {}),
    "DDP, losses read": ("single", ["reads"], {}),
    "stage 2": ("zero2", [], {}),
    "stage 2, DeepSpeed's overflow check and norms": ("zero2", ["norm"], {}),
    "stage 2, losses and norms read": ("zero2", ["reads"], {}),
    "stage 2, gradients copied side by side": ("zero2", ["copies"], {}),
    "stage 2, as before": ("zero2", ["norm", "reads", "copies"], {}),
    "stage 3": ("zero3", [], {}),
    "stage 3, DeepSpeed's linear layers": ("zero3", ["linear"], {}),
    "stage 3, gradients copied side by side": ("zero3", ["copies"], {}),
    "stage 3, a copy for each gradient": ("zero3", ["each"], {}),
    "stage 3, DeepSpeed's norms": ("zero3", ["norm"], {}),
    "stage 3, parameters looked for": ("zero3", ["walks"], {}),
    "stage 3, messages of releases formatted": ("zero3", ["releases"], {}),
    "stage 3, as before": ("zero3", ["reads", "linear", "copies", "each", "norm", "walks", "releases"], {}),
    "stage 2, packs": ("zero2", [], {"packing": True}),
    "stage 2, packs under a mask": ("zero2", ["rows"], {"packing": True}),
}


def write_job(folder: Path) -> Path:
    recipe = write_recipe(
        folder,
        dataset_name=str(ROOT / "tiny_world"),
        per_device_train_batch_size=1,
        logging_steps=1000,
        max_steps=STEPS,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 24, "num_attention_heads": 4}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    config = GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"], vocab_size=len(tokenizer), **sizes)
    config.bos_token_id, config.eos_token_id = 0, 0
    config.hidden_dropout = config.attention_dropout = 0.0
    config.save_pretrained(folder / "model")
    return recipe


def main(out: Path) -> None:
    found: dict[str, dict] = {name: {} for name in VARIANTS}
    timed: dict[str, list] = {name: [] for name in VARIANTS}  # (seconds, of the processor) by step
    group = Group(1)
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_job(Path(folder))
        for order in range(ORDERS):
            for name in list(VARIANTS) if order % 2 == 0 else reversed(VARIANTS):
                strategy, off, keys = VARIANTS[name]
                argv = [str(recipe), "--output_dir", f"{folder}/out", "--overwrite", "true", *named(strategy)]
                argv += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
                run = group.run(step_costs.costs_of_steps, argv=argv, off=off)[0]
                timed[name] += run["seconds"][UNTIMED:]
                found[name] |= run["costs"][-1] | {"last_loss": run["losses"][-1]}
                print(name, found[name], flush=True)
    for name, steps in timed.items():
        for clock, seconds in zip(CLOCKS, zip(*steps, strict=True), strict=True):
            least, middle = min(seconds), statistics.median(seconds)
            found[name][clock] = {"least": round(1000 * least, 1), "median": round(1000 * middle, 1)}
    group.close()
    document = {
        "job": f"GPT-NeoX of 24 layers of width 32, one process, one row of the demo a step, {STEPS} steps",
        "milliseconds": f"of steps {UNTIMED + 1} to {STEPS - 1} in {ORDERS} turns; the speed of the machine varied",
        "hardware": hardware_facts("cpu"),
        "versions": library_versions(),
        "variants": found,
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
