"""Fifteen minutes on one GPU, without a network, in calls of at most 280 s; benchmarks/gpu_session.sh runs this there.

    python benchmarks/gpu_session.py --plans               # before, on a CPU: benchmarks/session/plans.json
    python benchmarks/gpu_session.py --call 1 --out OUT    # on the GPU; the calls: benchmarks/session/cases.yaml
    python benchmarks/gpu_session.py --call 1 2 3 --tiny   # the same jobs with small models on a CPU: what is broken
    python -m benchmarks.gpu_results benchmarks/session/NAME.yaml OUT   # after: benchmarks/results/gpu_NAME.json

Several jobs import their libraries and load their models at once, and wait for their turn (session/turns.py). What is
timed then runs alone; of the others as many as the GPU's memory holds. Each is a row of OUT/rows.jsonl as soon as it
ends, a failed one too, and the rest goes on. A second call with the same OUT runs what is missing or failed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from zero_recipes.tools.plan.job import Job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from zero_recipes.core.files import strict_json, write_json  # noqa: E402
from zero_recipes.metrics.schema import FILE, Metrics  # noqa: E402

SESSION = ROOT / "benchmarks" / "session"
PLANS, WORK = SESSION / "plans.json", ROOT / "output" / "gpu_session_work"
TABLE = yaml.safe_load((SESSION / "cases.yaml").read_text())
MODELS = ROOT / "zero_recipes" / "tools" / "plan" / "models"
FROM_CASE = ("call", "model", "strategy", "keys", "words", "way", "program", "layers", "ranks")  # in a row
LOADING = 110  # seconds that a job may take until it is ready for its turn
LEFT = 8  # seconds that other ranks have to end after one that failed
SHARED_GPU = "zero_recipes.checks.preflight.refuse_uneven_gpus"  # two ranks of a machine on one GPU: only here
Case = dict[str, Any]  # a row of cases.yaml of one strategy, with its name; a row of OUT, with what was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--call", type=int, nargs="+", choices=list(TABLE["calls"]), default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "output" / "gpu_session")
    parser.add_argument("--seconds", type=float, default=TABLE["seconds"], help="for each call")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it, e.g. 2.8b")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs must not outlive it
    if given.plans:
        wanted = [case for case in cases(*TABLE["calls"]) if is_planned(case)]
        write_json(PLANS, {"made_from": planned_from(), "plans": plans_of(wanted)})
    known = json.loads(PLANS.read_text())
    if given.call and not given.tiny and known.get("made_from") != planned_from():
        parser.error(f"{PLANS} was made for other ds_configs or cases. Run --plans first, on a machine without a GPU")
    given.out.mkdir(parents=True, exist_ok=True)
    done = {row["case"] for row in read_rows([given.out]) if status_of(row) == "ok"}
    for call in given.call:
        wanted = [small(case) if given.tiny else case for case in cases(call)]
        missing = [case for case in wanted if case["name"] not in done and given.only in case["name"]]
        folders = {case["folder"] for case in missing if case.get("program")}  # prepared anew, on any machine
        wanted = [case for case in wanted if case in missing or (case.get("serves") and case["folder"] in folders)]
        machine = Machine(tiny=given.tiny, ends=time.monotonic() + given.seconds)
        for case, found in machine.run(wanted):
            row = {"planned": None if given.tiny else known["plans"].get(case["name"])} | found
            row |= {key: case[key] for key in FROM_CASE if key in case}
            row |= {"case": case["name"], "beside_others": not case.get("alone", False)}
            with open(given.out / "rows.jsonl", "a", encoding="utf-8") as file:
                file.write(strict_json(row) + "\n")
            print(in_a_line(row), flush=True)


# the jobs


def cases(*calls: int) -> list[Case]:
    found = []
    for row in TABLE["runs"]:
        if row["call"] not in calls:
            continue
        if "compile" in row:
            found.append(row | {"name": row["compile"], "words": "", "keys": {}})
            continue
        programs = row.get("programs") or [[None, way] for way in row.get("way", [""])]
        named = {key: value for key, value in row.items() if key not in ("programs", "strategies", "way")}
        for strategy in row["strategies"]:
            if "programs" in row:
                folder = name_of(row["call"], row["model"], strategy)
                first = {
                    "program": "prepare",
                    "way": "",
                    "folder": folder,
                    "name": f"{folder}-prepare",
                    "alone": False,
                    "limit": 90,
                    "serves": True,
                }
                found.append({"keys": {}, "words": ""} | named | first | {"strategy": strategy})
            for program, way in programs:
                words = " ".join(part for part in (row.get("words"), program, way) if part)
                case = {"keys": {}} | named | {"strategy": strategy, "program": program, "way": way, "words": words}
                case["name"] = name_of(row["call"], row["model"], strategy, words)
                if program:  # the first one's batches are for the others
                    case |= {"folder": folder, "serves": [program, way] == programs[0]}
                found.append(case)
    return found


def name_of(*parts: Any) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, parts)).lower().strip())


def is_planned(case: Case) -> bool:
    """Runs of the recipe itself whose batches are full. Kernels of ZeRO++ are not simulated."""
    is_run = "strategy" in case and not case["program"] and not case["way"]
    return is_run and case["model"] != "tiny" and not case["keys"].get("packing")


def small(case: Case) -> Case:
    """The same job for a CPU."""
    own = TABLE["tiny"]
    keys = case["keys"] | own["keys"]
    for key, most in (("max_length", own["longest"]), ("per_device_train_batch_size", own["batch"])):
        keys[key] = min((TABLE["base"] | keys)[key], most)
    return case | {
        "keys": keys,
        "tiny": True,
        "limit": 8 * case["limit"],
        "steps": 2,
        "rows": "own",
        "gb": 1,
        "host": 3,
    }


def config_of(case: Case) -> dict[str, Any]:
    """The model's config.json."""
    name = case["model"]
    config = dict(TABLE["shapes"].get(name) or json.loads((MODELS / f"{name}.json").read_text())["config"])
    if "layers" in case:
        config["num_hidden_layers"] = case["layers"]
    if case.get("tiny"):
        config |= {key: value for key, value in TABLE["tiny"]["shape"].items() if key in config}
        config.pop("layer_types", None)  # of the layers that are gone
    return config


def write_recipe(case: Case) -> Path:
    """The case's recipe and its model's folder, without weights, beneath WORK. It is compared with a plan that was
    made before."""
    recipe = yaml.safe_load(Path("recipes/tiny.yaml").read_text())
    WORK.mkdir(parents=True, exist_ok=True)
    keys = way_of(case).get("keys", {}) | case["keys"]
    if case["model"] != "tiny":
        recipe = TABLE["base"] | keys
        model, rows = WORK / f"{case['name']}-model", WORK / f"{case['name']}-rows"
        shutil.copytree("tiny_world/base", model, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        (model / "config.json").write_text(json.dumps(config_of(case)))
        rows.mkdir(exist_ok=True)
        batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
        count = recipe["max_steps"] * batch * case.get("ranks", 1)
        words = ["the", "red", "fish", "hums", "in", "the", "cave", "by", "the", "river", "."]
        text = " ".join(words * (recipe["max_length"] // len(words) + 1))  # longer than a row: every batch is full
        if recipe.get("packing"):
            text = " ".join(words * max(1, recipe["max_length"] // 10 // len(words)))
            count *= 10
        (rows / "train.jsonl").write_text((json.dumps({"text": text}) + "\n") * max(count, 16))
        recipe |= {"model_name_or_path": str(model), "dataset_name": str(rows)}
    recipe |= keys | {"skip_plan": True, "overwrite": True}
    path = WORK / f"{case['name']}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    return path


def way_of(case: Case) -> dict[str, Any]:
    return TABLE["ways"][case["way"]] if case.get("way") else {}


def ds_config_of(case: Case) -> str | None:
    """The file of the strategy, or a copy without what the case's way leaves out."""
    if case["strategy"] in ("ddp", "single"):
        return None
    path = Path("ds_configs", f"{case['strategy']}.json")
    left_out = way_of(case).get("ds", [])
    if not left_out:
        return str(path)
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in left_out}
    copy = WORK / f"{case['name']}.json"
    copy.write_text(json.dumps(config))
    return str(copy)


def planned_from() -> str:
    """A hash of what the plans are made for: measured peaks would be compared with those of other buckets."""
    files = [SESSION / "cases.yaml", *sorted(Path("ds_configs").glob("*.json"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def plans_of(wanted: list[Case]) -> dict[str, Any]:
    """{name: prediction}, as the run would plan itself with the tested versions of the libraries."""
    from zero_recipes.tools.plan.predict import Predictor

    jobs = {case["name"]: job_of_case(case) for case in wanted}
    predict = Predictor()
    predict.prepare(list(jobs.values()))
    return {name: predict(job).model_dump(mode="json") for name, job in jobs.items()}


def job_of_case(case: Case) -> "Job":
    """Of a case, or of a row of benchmarks/results/gpu_*.json."""
    from zero_recipes.tools.plan import job as plan_job

    named = {"name": case.get("name") or case["case"]}
    recipe = plan_job.read_recipe(write_recipe(case | named), [])
    config, strategy = plan_job.model_config(recipe.settings), case["strategy"]
    file = "ddp" if strategy == "single" else strategy
    known = plan_job.read_strategies(recipe, (file,))
    ranks = case.get("ranks") or case.get("world_size", 1)
    return plan_job.job_of(recipe, config, strategy, known[file], ranks)


# how they run


@dataclass
class Started:
    case: Case
    folder: Path  # of its results
    ranks: list[subprocess.Popen]
    since: float  # a time.monotonic(), as the others
    went: float | None = None  # when its turn came
    failed: float | None = None  # when a rank did

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    @property
    def gate(self) -> str:
        return str(self.folder / "gate")

    def is_ready(self) -> bool:
        """A job without a gate (a compilation, a preparation) works from its start on."""
        return all(Path(f"{self.gate}.{rank}.ready").exists() for rank in range(len(self.ranks)))

    def has_no_gate(self) -> bool:
        return "compile" in self.case or self.case.get("program") == "prepare"

    def go(self) -> None:
        self.went = time.monotonic()
        Path(f"{self.gate}.go").touch()

    def end(self) -> None:
        """Its own processes, each the leader of a group."""
        for order in (signal.SIGTERM, signal.SIGKILL):
            for rank in self.ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, order)
            until = time.monotonic() + 3
            while any(code is None for code in self.codes()) and time.monotonic() < until:
                time.sleep(0.1)


@dataclass
class Machine:
    tiny: bool
    ends: float  # a time.monotonic()
    running: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        self.slots = 2 if self.tiny else cores - 1
        self.host = 8 if self.tiny else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 * 0.9
        self.gpu = 1000.0 if self.tiny else gpu_gigabytes()

    def run(self, wanted: list[Case]):
        """Yields (case, what was measured) as each ends."""
        pending = []
        for case in wanted:
            if self.tiny and (case.get("cuda_only") or way_of(case).get("cuda_only")):
                yield case, {"status": "skipped", "error": "it needs CUDA"}
            else:
                pending.append(case)
        try:
            while pending or self.running:
                for job in list(self.running):
                    why = self.why_over(job)
                    if why is not None:
                        self.running.remove(job)
                        yield job.case, measured(job, why)
                if time.monotonic() > self.ends:
                    for case in pending:
                        yield case, {"status": "skipped", "error": "no time was left in its call"}
                    pending = []
                self.let_go()
                self.start(pending)
                time.sleep(0.1)
        finally:
            for job in self.running:
                job.end()

    def why_over(self, job: Started) -> str | None:
        """None where it goes on; "" where all ranks ended by themselves. Ends those that must not go on."""
        now = time.monotonic()
        codes = job.codes()
        if all(code is not None for code in codes):
            return ""
        if any(code not in (None, 0) for code in codes):
            job.failed = job.failed or now
        begun = job.since if job.went is None else job.went
        own = job.case["limit"] + way_of(job.case).get("more", 0)
        limit = own if job.went is not None or job.has_no_gate() else LOADING * (8 if self.tiny else 1)
        if now > self.ends:
            why = "its call's time was over"
        elif now > begun + limit:
            why = f"its time was over: {limit} s"
        elif job.failed is not None and now > job.failed + LEFT:
            why = f"a rank failed: {codes}"
        else:
            return None
        job.end()
        return why

    def let_go(self) -> None:
        """Whose turn it is: one that is timed where nothing else works or loads, of the others what fits the GPU."""
        working = [job for job in self.running if job.went is not None or job.has_no_gate()]
        if any(job.case.get("alone") for job in working):
            return
        for job in self.running:
            if job in working or not job.is_ready():
                continue
            others = [other for other in self.running if other is not job and other in working]
            if job.case.get("alone"):
                loading = any(not (other in working or other.is_ready()) for other in self.running)
                if not others and not loading:
                    job.go()
                return  # those behind it wait, so that its turn comes
            if sum(other.case.get("gb", 1) for other in [*others, job]) <= self.gpu:
                job.go()
                working.append(job)

    def start(self, pending: list[Case]) -> None:
        """The next ones in their order, not while something timed works or waits for the machine to be quiet."""
        if any(job.case.get("alone") and (job.went is not None or job.is_ready()) for job in self.running):
            return
        for case in list(pending):
            used = sum(len(job.ranks) for job in self.running)
            held = sum(job.case.get("host", 3) for job in self.running)
            is_first = not self.running
            ranks = case.get("ranks", 1)
            if not is_first and (used + ranks > self.slots or held + case.get("host", 3) > self.host):
                return
            to_come = {other["name"] for other in [*pending, *(job.case for job in self.running)]}
            if case.get("after") in to_come:
                continue
            pending.remove(case)
            self.running.append(started(case))


def gpu_gigabytes() -> float:
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return int(said.stdout.split()[0]) * 2**20 / 1e9


def started(case: Case) -> Started:
    out = WORK / case.get("folder", case["name"])
    folder = out
    if case.get("program") in (None, "prepare"):
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if case.get("program") == "prepare":
        model = case["model"] if not case.get("tiny") else "own"
        keys = {key: value for key, value in case["keys"].items() if key in ("use_cpu", "dtype")}
        (out / "case.json").write_text(json.dumps(case | {"model": model, "keys": keys}))
    if case.get("program"):
        folder = out / name_of(case["words"] or "prepare")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    command = command_of(case, out, folder)
    ranks = case.get("ranks", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = os.environ | environment_of(case, rank, port) | {"SESSION_GATE": str(folder / "gate")}
        with open(folder / f"log.{rank}.txt", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log))
    return Started(case, folder, processes, time.monotonic())


def command_of(case: Case, out: Path, folder: Path) -> list[str]:
    if "compile" in case:
        load = f"from deepspeed.ops.op_builder.all_ops import ALL_OPS; ALL_OPS[{case['compile']!r}].load(verbose=True)"
        return [sys.executable, "-c", load]
    if case["program"]:
        return [sys.executable, str(SESSION / "side_by_side.py"), case["program"], str(out), str(folder)]
    command = [sys.executable, str(SESSION / "run.py"), str(write_recipe(case)), "--output_dir", str(folder)]
    ds_config = ds_config_of(case)
    return command if ds_config is None else [*command, "--deepspeed", ds_config]


def environment_of(case: Case, rank: int, port: int) -> dict[str, str]:
    """What a launcher sets where several ranks share the GPU: NCCL from 2.30 takes them, each as another machine's."""
    way = dict(way_of(case))
    ranks = case.get("ranks", 1)
    # two threads on two cores that are busy wait for each other for seconds
    found = {"OMP_NUM_THREADS": "1" if case.get("tiny") else "2"} | way.pop("environment", {})
    if ranks > 1:
        per_node = case.get("per_node", 1)
        if per_node > 1:
            way["without"] = [*way.get("without", []), SHARED_GPU]
        node = str(rank // per_node)
        found |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(per_node)}
        found |= {"NODE_RANK": node, "GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        if "SESSION_NCCL" in os.environ:  # the file of a newer NCCL than torch's own
            found["LD_PRELOAD"] = os.environ["SESSION_NCCL"]
    return found | {"SESSION_WAY": json.dumps(way)}


def measured(job: Started, why: str) -> dict[str, Any]:
    """Status, error, metrics.json and what the job's script measured beside it."""
    case, folder = job.case, job.folder
    codes = job.codes()
    found: dict[str, Any] = {"status": "ok" if not any(codes) else "failed", "error": why or None}
    now = time.monotonic()
    found["seconds"] = {
        "until_its_turn": round((job.went or now) - job.since),
        "its_turn": round(now - (job.went or now)),
    }
    if any(codes) and not why:
        found["error"] = f"exit codes {codes}"
    beside, metrics = folder / "beside.json", folder / FILE
    found["beside"] = json.loads(beside.read_text()) if beside.is_file() else None
    if metrics.is_file():
        row = Metrics.read(metrics)
        if row.status != "running":
            found |= {"status": row.status, "error": row.error or found["error"]}
        found["metrics"] = json.loads(row.model_dump_json(by_alias=True, exclude_unset=True))
    elif found["status"] == "ok" and case.get("program") != "prepare" and "compile" not in case and not found["beside"]:
        found |= {"status": "failed", "error": "it left no result"}
    if why:
        found["status"] = "failed"
    if found["status"] != "ok":
        logs = [log.read_text(errors="replace").splitlines()[-60:] for log in sorted(folder.glob("log.*.txt"))]
        found["log"] = [line for log in logs for line in log]
    if not case.get("program"):
        shutil.rmtree(folder)
        for name in (f"{case['name']}-model", f"{case['name']}-rows"):
            shutil.rmtree(WORK / name, ignore_errors=True)
    return found


def in_a_line(row: Case) -> str:
    said = f"{row['case']}: {row['status']}"
    metrics = row.get("metrics") or {}
    program = (row.get("beside") or {}).get("program")
    if program:
        cold, warm = (sorted(program[key])[len(program[key]) // 2] for key in ("cold_seconds", "warm_seconds"))
        said += f", {1000 * cold:.0f} ms a step cold, {1000 * warm:.0f} warm, loss {program['held_out_loss']:.4f}"
    elif (metrics.get("step_seconds") or {}).get("median"):
        said += f", {1000 * metrics['step_seconds']['median']:.0f} ms a step"
        said += f", {metrics['tokens_per_second']['non_padding']:,.0f} tokens/s"
    if row["error"]:
        said += f": {row['error'].splitlines()[0]}"[:300]
    return said


def read_rows(paths: list[Path]) -> list[Case]:
    """The rows of files, and of rows.jsonl below folders. Of each case the one that counts: the latest, unless an
    earlier one is ok and the later is not."""
    files = [file for path in paths for file in (sorted(path.rglob("rows*.jsonl")) if path.is_dir() else [path])]
    found: dict[str, Case] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the machine went away while it was written
        if status_of(found.get(row["case"], {})) != "ok" or status_of(row) == "ok":
            found[row["case"]] = row
    return list(found.values())


def status_of(row: Case) -> str | None:
    return row.get("status") or row.get("metrics", {}).get("status")


if __name__ == "__main__":
    main()
