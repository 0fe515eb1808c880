"""The members of the ZeRO family side by side on CPU processes: python -m benchmarks.zero_family

Writes benchmarks/results/zero_family.json, from which scripts/zero_family_page.py makes the tables of
docs/zero_family.md. ZeRO++ runs on four processes that stand for two nodes of two, with
tests/helpers/quantizer_on_cpu.py in the place of the CUDA op. A few minutes on two cores.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.group import Group
from tests.helpers.tiny import write_model, write_recipe
from zero_recipes.core import environment
from zero_recipes.theory.deepspeed_comm import explained, volume_terms
from zero_recipes.theory.zero_paper import PLUS_PLUS, communication_units, paper_volume, plus_plus_units

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "zero_family.json"
NEVER_KEPT = {  # stage 3 gathers every parameter in forward and again in backward, as it must with large models
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
TEXTBOOK = {"use_multi_rank_bucket_allreduce": False}
# (what, stage, micro steps, keys of zero_optimization, arguments of volume_terms)
COMMUNICATION = [
    ("stage 0", 0, 1, {}, {}),
    ("stage 0", 0, 4, {}, {}),
    ("stage 1", 1, 1, {}, {}),
    ("stage 1", 1, 4, {}, {}),
    ("stage 1, textbook's switch", 1, 1, TEXTBOOK, {"multi_rank_buckets": False}),
    ("stage 2", 2, 1, {}, {}),
    ("stage 2", 2, 4, {}, {}),
    ("stage 2, textbook's switch", 2, 1, TEXTBOOK, {"multi_rank_buckets": False}),
    ("stage 3, kept gathered", 3, 1, {"stage3_param_persistence_threshold": 0}, {}),
    ("stage 3, nothing kept", 3, 1, NEVER_KEPT, {"kept": False}),
    ("stage 3, nothing kept", 3, 4, NEVER_KEPT, {"kept": False}),
]
MAGNITUDES = [1e-9, 1e-8, 1e-7, 1e-6, 1e-3, 1.0, 1e3]
OFFLOADED = ("zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_infinity")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="zero-family-"))
    model = write_model(folder / "even", hidden=256, intermediate=1024, vocabulary=1408)
    recipe = write_recipe(folder, model_name_or_path=str(model), max_steps=12, max_grad_norm=1.0)
    large = write_model(folder / "large", hidden=512, intermediate=4096, vocabulary=1408)
    (folder / "offload").mkdir()
    swapped = write_recipe(folder / "offload", model_name_or_path=str(large), max_steps=8)
    two = Group(2)
    sent = [_communication(two, recipe, folder, *case) for case in COMMUNICATION]
    offload = {name: _offload(two, swapped, folder, name) for name in OFFLOADED}
    two.close()
    four = Group(4)
    plus_plus = {name: _plus_plus(four, recipe, folder, name) for name in ("zero3", *PLUS_PLUS)}
    errors = quantized_errors(four)
    four.close()
    document = {
        "command": "python -m benchmarks.zero_family",
        "communication": sent,
        "offload": offload,
        "plus_plus": plus_plus,
        "quantized_gradient_errors": errors,
        "versions": environment.versions(),
        "hardware": environment.hardware("cpu"),
    }
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


def _train(group: Group, case: str, recipe: Path, output_dir: Path, name: str, zero: dict, *more: str) -> list[dict]:
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    config["zero_optimization"] |= zero
    argv = [str(recipe), "--output_dir", str(output_dir), "--overwrite", "true", "--deepspeed", json.dumps(config)]
    print(name, zero, *more, flush=True)
    return [result["metrics"] for result in group.run(case, argv=[*argv, *more])]


def _communication(group: Group, recipe: Path, folder: Path, what, stage, accumulation, zero, keywords) -> dict:
    more = ("--gradient_accumulation_steps", str(accumulation))
    metrics = _train(group, "train", recipe, folder / "out", f"zero{stage}", zero, *more)[0]
    terms = volume_terms(stage, accumulation, **keywords)
    return {
        "what": what,
        "micro_steps": accumulation,
        "bytes_by_collective": metrics["communication_bytes_per_step"],
        "measured_phi": _phi(metrics, metrics["communication_bytes_per_step"]),
        "source_phi": sum(terms.values()),
        "source": explained(terms),
        "paper_phi": communication_units(stage),
        "step_seconds": metrics["step_seconds"]["median"],
        "loss_history": metrics["loss_history"],
    }


def _offload(group: Group, recipe: Path, folder: Path, name: str) -> dict[str, Any]:
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    metrics = _train(group, "train", recipe, folder / "out", name, {}, "--nvme_path", str(disk))[0]
    kept = ("parameters", "model_state_bytes", "peak_memory_bytes", "nvme", "tokens_per_second", "loss_history")
    found = {key: metrics[key] for key in kept} | {"step_seconds": metrics["step_seconds"]["median"]}
    for measured in (found["nvme"] or {}).get("disks", []):
        measured.pop("path")  # of this machine
    return found


def _plus_plus(group: Group, recipe: Path, folder: Path, name: str) -> dict[str, Any]:
    metrics = _train(group, "family_cases.train_on_two_nodes", recipe, folder / "out", name, NEVER_KEPT)[0]
    return {
        "between_nodes_phi": _phi(metrics, metrics["communication_bytes_between_nodes"]),
        "paper_phi": plus_plus_units(**PLUS_PLUS[name]) if name in PLUS_PLUS else communication_units(3),
        "between_nodes_by_collective": metrics["communication_bytes_between_nodes"],
        "all_phi": _phi(metrics, metrics["communication_bytes_per_step"]),
        "params_bytes": max(rank["params"] for rank in metrics["model_state_bytes"]),
        "loss_history": metrics["loss_history"],
        "grad_norm_history": metrics["grad_norm_history"],
    }


def quantized_errors(group: Group) -> dict[str, dict[str, float]]:
    """Relative error of qgZ's mean of bf16 gradients against fp64, the worst rank's, {root mean square: how: error}."""
    ranks = group.run("family_cases.quantized_ranges", magnitudes=MAGNITUDES, seed=0)
    ranks = [rank["errors"]["bfloat16"] for rank in ranks]
    return {
        size: {how: max(rank[size][n] for rank in ranks) for n, how in enumerate(("cast to fp16", "scaled first"))}
        for size in ranks[0]
    }


def _phi(metrics: dict, sent: dict[str, int]) -> float:
    return paper_volume(sent) / (2 * metrics["trainable_parameters"])


if __name__ == "__main__":
    main()
