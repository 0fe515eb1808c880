"""What the checksums of a checkpoint cost: seconds of a save with and without them, and of the look at a resume.

    python benchmarks/checksums.py [--gigabytes 1.5] [--folder .]

Writes benchmarks/results/checksums.json. A checkpoint is tensors that torch.save writes as DeepSpeed does, one file for
each of two ranks, and one safetensors file; then manifest.write brings all of it to the disk, with and without
checksums in turn. The page cache is full of what was just written, as in a run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from zero_recipes.checkpoint import checksums, manifest  # noqa: E402
from zero_recipes.core import environment  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402

REPEATS = 12


def save(folder: Path, states: list[torch.Tensor], weights: torch.Tensor, with_checksums: bool) -> dict[str, float]:
    """Seconds of one save: of writing the files, and of the manifest, which waits for the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # what the last save left to the disk is not this one's
    started = time.perf_counter()
    manifest.begin(folder)
    for rank, tensor in enumerate(states):
        torch.save({"state": tensor}, folder / f"optim_states_{rank}.pt")
    save_file({"weights": weights}, folder / "model.safetensors")
    written = time.perf_counter()
    manifest.write(folder, {"step": 1}, with_checksums)
    ended = time.perf_counter()
    return {"files": written - started, "manifest": ended - written, "all": ended - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    elements = int(arguments.gigabytes * 1e9 / 4 / 7)  # 6 of 7 parts are Adam's states and masters, in fp32
    states, weights = [torch.rand(3 * elements) for _ in range(2)], torch.rand(elements)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder)) / "checkpoint-1"
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    looks, hashing = [], []
    try:
        save(folder, states, weights, True)  # not counted
        for number in range(2 * REPEATS):
            name = ("without", "with")[(number + number // 2) % 2]  # without, with, with, without, ...
            found[name].append(save(folder, states, weights, name == "with"))
            if name == "with":
                started = time.perf_counter()
                assert manifest.content_fault(folder) is None
                looks.append(time.perf_counter() - started)
                started = time.perf_counter()
                for path in folder.iterdir():
                    checksums.xxh3_128(path)
                hashing.append(time.perf_counter() - started)
    finally:
        shutil.rmtree(folder.parent)
    median = {
        name: {part: statistics.median(save[part] for save in saves) for part in saves[0]}
        for name, saves in found.items()
    }
    size = (7 * elements) * 4
    document = {
        "what": "seconds of a save with and without checksums (xxh3_128), medians; `look`: content_fault at a resume, "
        "from the page cache; `one_thread`: hashing alone, one file after another. The cost is what the manifest takes "
        "longer, in percent of a whole save: writing the files is the same in both",
        "bytes": size,
        "repeats": REPEATS,
        "seconds": median,
        "cost_of_a_save_percent": 100
        * (median["with"]["manifest"] - median["without"]["manifest"])
        / median["without"]["all"],
        "every_save": found,
        "look_seconds": statistics.median(looks),
        "one_thread_seconds": statistics.median(hashing),
        "versions": environment.versions(),
        "hardware": environment.hardware("cpu"),
    }
    write_json(ROOT / "benchmarks" / "results" / "checksums.json", document)
    for name, seconds in median.items():
        print(f"{name:8s} {seconds['all']:.3f} s (files {seconds['files']:.3f}, manifest {seconds['manifest']:.3f})")
    print(f"checksums cost {document['cost_of_a_save_percent']:+.1f} % of a save of {size / 1e9:.2f} GB")
    print(
        f"a resume looks at them for {document['look_seconds']:.3f} s; "
        f"one thread for {document['one_thread_seconds']:.3f} s"
    )


if __name__ == "__main__":
    main()
