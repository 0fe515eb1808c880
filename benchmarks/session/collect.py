"""The rows of a session as committed results, the README's part on GPUs, and the plan's constants by fit."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.session.cases import PARTS, rehearsed
from benchmarks.throughput_table import together, tokens_per_second
from zero_recipes.core.files import write_json, write_text
from zero_recipes.core.hardware import gpus

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
FILES = {
    1: "gpu_tiny",
    2: "gpu_plan",
    3: "gpu_speed",
    4: "gpu_offload",
    5: "gpu_quantizer",
    6: "gpu_fp16",
    7: "gpu_throughput",
}
NOTHING = "**No GPU has run any of it yet**; `benchmarks/gpu_session.sh` asks one card in an hour, without a network."
Row = dict[str, Any]


def collect(folder: Path, results: Path, trial: bool = False) -> list[str]:
    """Write the results of all partN.jsonl below `folder`; lines that say what was written.

    A later row of a case takes the place of an earlier one, unless that went well and the later did not. `trial`: the
    rows of a rehearsal are taken, and neither README nor constants are touched. Raises ValueError where there are no
    rows, or rows of a rehearsal outside of a trial.
    """
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"no partN.jsonl with rows below {folder}")
    if not trial and any(row["rehearsal"] for row in rows):
        raise ValueError(f"rows below {folder} are of a rehearsal on a CPU: --results FOLDER takes them for a trial")
    said = []
    for part, name in FILES.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            write_json(results / f"{name}.json", document(part, own))
            said.append(f"{results / name}.json: {len(own)} rows")
    if not trial:
        said += fit_constants(results)
        write_text(README, with_gpu_part(README.read_text(), results))
    return said


def keep_rehearsal(folder: Path, results: Path) -> list[str]:
    """How every run of a rehearsal ended, as results/gpu_session_rehearsal.json. Raises ValueError without rows."""
    rows = read_rows(folder)
    if not rows or not all(row["rehearsal"] for row in rows):
        raise ValueError(f"the rows below {folder} are not those of a rehearsal")
    machines = [row["machine"] for row in rows if "machine" in row]
    kept = {
        PARTS[part]: [
            {key: row.get(key) for key in ("case", "status", "seconds", "error")} | _last_words(row)
            for row in rows
            if row["part"] == part and "machine" not in row and row["status"] != "skipped"
        ]
        for part in PARTS
    }
    ended = {row["case"] for runs in kept.values() for row in runs}
    missing = sorted({case.slug for part in PARTS for case in rehearsed(part)} - ended)
    document = {"machine": machines[0], "missing": missing, "parts": kept}
    write_json(results / "gpu_session_rehearsal.json", document)
    counts = {part: Counter(row["status"] for row in runs) for part, runs in kept.items()}
    return [*(f"{part}: {dict(count)}" for part, count in counts.items()), f"missing: {missing}"]


def _last_words(row: Row) -> Row:
    return {} if row.get("status") == "ok" else {"log": (row.get("log") or [])[-12:]}


def read_rows(folder: Path) -> list[Row]:
    """Of each case the row that counts, in the order of the files."""
    found: dict[tuple, Row] = {}
    for path in sorted(folder.rglob("part*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the machine went away while it was written
            before = found.get((row["part"], row["case"]))
            if before is None or before.get("status") != "ok" or row.get("status") == "ok":
                found[row["part"], row["case"]] = row
    return list(found.values())


def document(part: int, rows: list[Row]) -> Row:
    """One results file: the machine, the rows, and what is computed from them."""
    machine = next((row["machine"] for row in rows if "machine" in row), None)
    measured = [_with_derived(part, row, machine) for row in rows if "machine" not in row]
    return {"part": PARTS[part], "rehearsal": rows[0]["rehearsal"], "machine": machine, "rows": measured}


def _with_derived(part: int, row: Row, machine: Row | None) -> Row:
    kept = {key: value for key, value in row.items() if key not in ("part", "rehearsal")}
    if row.get("status") != "ok":
        return kept
    derive = {2: _against_plan, 3: _speed, 7: _side_by_side}.get(part)
    return kept if derive is None else kept | {"derived": derive(row, machine)}


def _against_plan(row: Row, _machine: Row | None) -> Row:
    """Planned over measured, of both peaks, and what the card held beside torch's allocator."""
    peak, plan = row["metrics"]["peak_memory_bytes"][0], row["planned"]
    if peak["allocated"] is None or plan is None:  # on a CPU, or without a plan
        return {}
    return {
        "allocated_ratio": plan["allocated_peak_bytes"] / peak["allocated"],
        "reserved_over_segments": peak["reserved"] / segments_of(plan) if segments_of(plan) else None,
        "within_reserved_range": plan["reserved_bytes"]["low"] <= peak["reserved"] <= plan["reserved_bytes"]["high"],
    } | beside_allocator(row)


def segments_of(plan: Row) -> int | None:
    """The allocator's segments as the simulation replayed them; formulas have none."""
    return plan.get("segment_bytes")


def beside_allocator(row: Row) -> Row:
    """{"context_bytes"} of a process that was alone on the card when training ended."""
    card = row.get("beside") or {}
    if not row.get("alone") or "free_bytes" not in card:
        return {}
    return {"context_bytes": card["total_bytes"] - card["free_bytes"] - card["reserved_now_bytes"]}


def _speed(row: Row, machine: Row | None) -> Row:
    """Median step by the session's own clock, FLOP/s by the plan's count, and its share of the card's.

    The plan counts recomputed operations too, so that under activation checkpointing the share is of the hardware's
    (HFU) and not of the model's FLOP (MFU).
    """
    seconds = (row.get("beside") or {}).get("step_seconds") or []
    timed = seconds[len(seconds) // 2 :]
    if not timed or row["planned"] is None:
        return {}
    step = statistics.median(timed)
    found = {"step_seconds": step, "flops_per_second": row["planned"]["flops_per_step"] / step}
    peak = peak_flops(machine)
    return found if peak is None else found | {"share_of_peak": found["flops_per_second"] / peak}


def _side_by_side(row: Row, machine: Row | None) -> Row:
    """{"tokens_per_second", "mfu", "held_out_loss"} by program, "recipe/trl" and "recipe/engine", of the programs that
    went well; MFU by the FLOPs a token of the recipe's metrics.json, which all three have in common."""
    good = {name: each for name, each in row["beside"]["programs"].items() if "error" not in each}
    speeds = {name: tokens_per_second(together([each], each["accumulation"])) for name, each in good.items()}
    flops, peak = row["metrics"].get("model_flops_per_token"), peak_flops(machine)
    mfu = {} if flops is None or peak is None else {name: flops * speed / peak for name, speed in speeds.items()}
    ratios = {f"recipe/{name}": speeds["recipe"] / speeds[name] for name in ("trl", "engine") if name in speeds}
    losses = {name: each["held_out_loss"] for name, each in good.items()}
    return {"tokens_per_second": speeds, "mfu": mfu, "held_out_loss": losses} | ratios


def peak_flops(machine: Row | None) -> float | None:
    """Dense bf16 FLOP/s of the card by the planner's table; None for one that it does not know."""
    try:
        name = json.loads((machine or {}).get("torch", "")).get("name", "")
    except ValueError:
        return None
    kind = re.search(r"\b([AHB]\d{3}|L40S?|L4)\b", name)
    known = [gpu for gpu in gpus(None).values() if kind and gpu.name.startswith(kind[1].lower() + "-")]
    sxm = [gpu for gpu in known if "pcie" not in gpu.name] if "PCIe" not in name else known
    return max((gpu.bf16_tflops for gpu in sxm), default=0) * 1e12 or None


def fit_constants(results: Path) -> list[str]:
    """The plan's context and fragmentation from what was measured; the communicator needs a second GPU."""
    from zero_recipes.plan import overheads

    files = [path for path in (results / f"{name}.json" for name in FILES.values()) if path.is_file()]
    fitted = constants(*(json.loads(path.read_text())["rows"] for path in files))
    named = ", ".join(f"benchmarks/results/{path.name}" for path in files)
    source = f"fitted by benchmarks/gpu_session.py --collect to {named}"
    if fitted:
        overheads.write_fitted({name: (value, source) for name, value in fitted.items()})
    return [f"{name}: {value}" for name, value in fitted.items()] or ["no row to fit the plan's constants to"]


def constants(*files: list[Row]) -> Row:
    """{"context": bytes, "fragmentation": factor}, as far as rows of GPUs tell.

    context: the median of the processes that were alone on the card. fragmentation: the worst measured reserved peak
    over the segments that the simulation replayed, never below 1.
    """
    good = [row for rows in files for row in rows if row.get("status") == "ok"]
    contexts = [found["context_bytes"] for found in map(beside_allocator, good) if found]
    ratios = [
        row["metrics"]["peak_memory_bytes"][0]["reserved"] / segments_of(row["planned"])
        for row in good
        if row.get("planned") and segments_of(row["planned"]) and row["metrics"]["peak_memory_bytes"][0]["reserved"]
    ]
    fitted = {"context": int(statistics.median(contexts))} if contexts else {}
    return fitted | ({"fragmentation": round(max(1.0, *ratios), 4)} if ratios else {})


def with_gpu_part(readme: str, results: Path = RESULTS) -> str:
    """The README with its part on GPUs filled in, from the committed results alone."""
    part = gpu_part(results)
    return re.sub(r"(<!-- gpu: begin[^\n]*-->\n).*?(<!-- gpu: end -->)", rf"\g<1>\n{part}\n\n\g<2>", readme, flags=re.S)


def gpu_part(results: Path = RESULTS) -> str:
    """What the committed results say, as Markdown; that there are none where there are none."""
    read = {part: results / f"{name}.json" for part, name in FILES.items()}
    found = {part: json.loads(path.read_text()) for part, path in read.items() if path.is_file()}
    if not found:
        return NOTHING
    machine = next(iter(found.values()))["machine"] or {}
    lines = [f"One GPU ({machine.get('nvidia_smi', 'unknown')}; torch {machine.get('versions', {}).get('torch')}):", ""]
    for part, content in found.items():
        good = [row for row in content["rows"] if row.get("status") == "ok"]
        link = f"[{FILES[part]}.json](benchmarks/results/{FILES[part]}.json)"
        lines.append(f"- {PARTS[part]}: {len(good)} of {len(content['rows'])} rows ok, {link}{_in_short(part, good)}")
    return "\n".join(lines)


def _in_short(part: int, rows: list[Row]) -> str:
    derived = [row.get("derived") or {} for row in rows]
    ratios = [each["allocated_ratio"] for each in derived if "allocated_ratio" in each]
    shares = [each["share_of_peak"] for each in derived if "share_of_peak" in each]
    if part == 2 and ratios:
        return f"; planned over measured allocated peak {min(ratios):.3f} to {max(ratios):.3f}"
    if part == 3 and shares:
        return f"; up to {max(shares):.1%} of the card's bf16 peak"
    faster = [each["recipe/trl"] for each in derived if "recipe/trl" in each]
    if part == 7 and faster:
        mfu = [each["mfu"]["recipe"] for each in derived if each["mfu"]]
        best = f", MFU up to {max(mfu):.1%}" if mfu else ""
        return f"; {min(faster):.2f} to {max(faster):.2f} times as fast as `trl sft` with its defaults{best}"
    return ""
