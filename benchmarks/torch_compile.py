"""Which strategies train the same losses with `torch_compile: true`, and which do not run.

    python -m benchmarks.torch_compile [STRATEGY ...] [fp32] [bf16]

Writes results/torch_compile.json, or replaces what is named in it. A GPT-NeoX with 2 layers, rows of one
length, on this machine's CPU: each strategy without and with the key, in fp32 and bf16. No check is on.
"""

import json
import random
import re
import sys
import tempfile
from pathlib import Path

from tests.helpers import cases
from tests.helpers.group import CaseFailed, Group
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.core.measured_on import hardware_facts, library_versions

STEPS = 3
LENGTH = 64
WORDS = ["red", "blue", "fish", "moss", "cave", "river", "hums", "barks", "fire", "wind", "the", "it", "is", "in"]
STRATEGIES = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
PRECISIONS = {"fp32": "false", "bf16": "true"}
OUT = Path(__file__).with_name("results") / "torch_compile.json"


def write_job(folder: Path) -> Path:
    """Every row is longer than max_length."""
    draw = random.Random(0)
    rows = []
    for number in range(40):
        answer = " ".join(draw.choices(WORDS, k=2 * LENGTH))
        rows.append({"instruction": f"Say {number}.", "input": "", "output": answer})
    (folder / "long").mkdir()
    (folder / "long" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_recipe(folder, dataset_name=str(folder / "long"), max_length=LENGTH, max_steps=STEPS)


def trained(group: Group, recipe: Path, strategy: str, out: Path, keys: list[str]) -> dict:
    """Losses, gradient norms and the number of compiled graphs, of rank 0; or the error."""
    argv = [*arguments(recipe, strategy, out), "--ignore", "ZR553", *keys]
    try:
        result = group.run(cases.train_and_count_graphs, argv=argv)[0]
    except CaseFailed as error:
        print(error, file=sys.stderr)
        named = [line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Exception|Refusal)\b", line)]
        return {"error": named[-1][:300]}
    metrics = result["metrics"]
    histories = {"losses": metrics["loss_history"], "norms": metrics["grad_norm_history"]}
    return histories | {"graphs": result["graphs"]}


def measured(strategy: str, precisions: list[str]) -> dict:
    """{precision: what was trained without and with the key}."""
    group = Group(1 if strategy == "single" else 2)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_job(Path(folder))
        for precision in precisions:
            keys = ["--bf16", PRECISIONS[precision]]
            plain = trained(group, recipe, strategy, Path(folder, precision), keys)
            keys += ["--torch_compile", "true"]
            compiled = trained(group, recipe, strategy, Path(folder, f"{precision}-compiled"), keys)
            row = found[precision] = {"plain": plain, "compiled": compiled}
            for key in ("losses", "norms"):  # DeepSpeed's stage 0 has no norm in fp32
                if not compiled.get(key):
                    continue
                pairs = zip(plain[key], compiled[key], strict=True)
                row[f"apart_{key}"] = max(abs(mine / theirs - 1) for theirs, mine in pairs)
            print(strategy, precision, row, flush=True)
    group.close()
    return found


def main(strategies: list[str], precisions: list[str]) -> None:
    known = json.loads(OUT.read_text())["strategies"] if OUT.is_file() else {}
    for strategy in strategies:
        known[strategy] = known.get(strategy, {}) | measured(strategy, precisions)
        facts = {"hardware": hardware_facts("cpu"), "versions": library_versions()}
        ordered = {name: known[name] for name in STRATEGIES if name in known}
        OUT.write_text(json.dumps(facts | {"strategies": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    named = set(sys.argv[1:])
    strategies = [name for name in STRATEGIES if name in named] or list(STRATEGIES)
    main(strategies, [name for name in PRECISIONS if name in named] or list(PRECISIONS))
