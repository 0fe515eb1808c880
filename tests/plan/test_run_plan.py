"""The plan of a run that starts: by a subprocess, refused on a GPU where it does not fit, kept in metrics.json."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator

from tests.helpers import cases, plan_cases
from tests.helpers.plan_jobs import GB, ROOT, job, made_up, recipe
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import predicted, preflight
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.schema import PredictedMetrics
from zero_recipes.tools import main as cli
from zero_recipes.tools.plan import of_run
from zero_recipes.tools.plan.formulas import overheads, predict_by_formulas
from zero_recipes.tools.plan.predict import Predictor
from zero_recipes.tools.plan.simulator import parent as simulation

# the answer: of zero_recipes/tools/plan/of_run.py, with predictions made up to order


@pytest.fixture
def answered(monkeypatch):
    """Answers for recipes/pythia.yaml on two GPUs of 80 GB. `need`: GB by job; `compared`: whether plans were compared
    with a GPU; `others`: GB that other processes use; `states`: GB of model states."""
    monkeypatch.chdir(ROOT)

    def answer(need, strategy="zero2", compared=True, source="engine", others=0, states=None, **values):
        beside = SimpleNamespace(measured=compared, beside_segments=lambda ranks: 0)
        if compared is not None:  # else as it is
            monkeypatch.setattr(of_run, "overheads", lambda: beside)

        def predict(asked):
            held = None if states is None else states * GB
            return made_up(asked, need(asked) * GB, held, cache=3 * GB).model_copy(update={"source": source})

        asked = job(strategy, **values).as_dict()
        written = {key: asked[key] for key in ("strategy", "world_size", "gpus_per_node", "ds_config", "device")}
        written["settings"] = dict(asked["settings"]) | {"deepspeed": asked["ds_config"]}
        card = {"rank": 0, "host": "here", "ranks": 2, "total": 80 * GB, "free": (80 - others) * GB, "reserved": 0}
        larger = card | {"rank": 1, "total": 200 * GB, "free": 200 * GB}
        question = {"job": written, "recipe": "recipes/pythia.yaml", "cards": [card, larger]}
        return of_run.answer_of(json.loads(json.dumps(question, default=str)), predict)

    return answer


@pytest.mark.parametrize(
    ("keys", "need", "code", "level", "says"),
    [
        ({}, 90, "ZR816", "error", "zero-recipes plan recipes/pythia.yaml shows what fits"),
        ({"compared": False}, 90, "ZR816", "warning", "at least 90.0 GB on each"),
        ({"compared": None}, 90, "ZR816", "error", "at least 90.0 GB on each"),
        ({"source": "formulas"}, 90, "ZR816", "warning", "By formulas"),
        ({"name": "tiny"}, 90, "ZR816", "warning", "at least 90.0 GB on each"),  # its rows are short
        ({"name": "tiny", "packing": True}, 90, "ZR816", "error", "at least 90.0 GB on each"),
        ({"others": 12}, 70, "ZR816", "error", "80.0 GB, 68.0 GB of it free"),
        ({"states": 81, "compared": False}, 100, "ZR840", "error", "weights 81.0 GB. A smaller batch does not"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(answered, keys, need, code, level, says):
    (found,) = answered(lambda job: need, **keys)["findings"]
    assert (found["code"], found["level"]) == (code, level)
    assert says in " ".join((found["what"], found["why"], found["fix"]))


@pytest.mark.parametrize(
    ("keys", "need", "says"),
    [
        ({}, 78, "may run out of memory with 80.0 GB"),
        ({"others": 12}, 50, "fits into 68.0 GB"),
        ({"states": 79, "compared": False}, 79, "may run out of memory with"),
    ],
)
def test_a_run_that_may_fit_goes_on_and_carries_its_plan(answered, keys, need, says):
    found = answered(lambda job: need, **keys)
    assert not found["findings"] and says in found["lines"][0]
    carried = PredictedMetrics.model_validate(found["predicted"])
    assert carried.peak_memory_bytes == need * GB == sum(carried.at_peak.values()) and carried.source == "engine"


@pytest.mark.parametrize(
    ("values", "block", "parts"),
    [
        ({}, {}, {"weights", "optimizer"}),
        ({"optim": "sgd"}, {}, {"weights"}),
        ({"load_in_4bit": True, "use_peft": True}, {}, set()),
        ({}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"weights"}),
        ({}, {"optimizer": {"type": "Lion"}}, {"weights"}),
        ({}, {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, set()),
    ],
)
def test_formulas_are_certain_of_nothing_else(values, block, parts):
    one = job("zero0", **values)
    one = replace(one, ds_config=one.ds_config | block)
    found = of_run.certain_states(one, predict_by_formulas(one))
    assert {part for part, held in found.items() if held} == parts


def test_no_plan_of_an_unknown_model_and_an_error_of_our_own_is_one(answered):
    found = answered(lambda job: 70, model_name_or_path="no/body")
    assert found["predicted"] is None and "config.json of no/body" in found["lines"][0] and not found["findings"]
    with pytest.raises(ZeroDivisionError):
        answered(lambda job: 1 // 0)


@pytest.mark.parametrize(("used", "reserved", "others"), [(1.5, 0, 0), (19, 18, 0), (30, 18, 12.0), (80, 0, 80.0)])
def test_what_other_processes_use_of_a_card(monkeypatch, used, reserved, others):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (int((80 - used) * GB), 80 * GB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: int(reserved * GB))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA H200")
    own = overheads().beside_segments(1) if others else 0
    card = predicted.card()
    assert 80 * GB - of_run.left_of(card) == pytest.approx(others * GB - own, abs=1)
    assert card["workspace"] == 32 * 2**20
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a card of tomorrow")
    assert predicted.card()["workspace"] == 0


# the run's side, with a planner of a few lines

ANSWERS = """
import json, sys
question = json.loads(sys.stdin.readline())
finding = {"code": "ZR816", "what": "too large", "why": "", "fix": "", "level": "error"}
needs = question["job"]["settings"]["max_length"]
print(json.dumps({"predicted": {"peak_memory_bytes": needs}, "lines": ["it fits"],
                  "findings": [finding] if any(needs > card["total"] for card in question["cards"]) else []}))
"""


def run_to_plan(device: str = "cuda", **values) -> Run:
    own = recipe("pythia")
    settings = own.settings.replace(**{"predict": device == "cpu", "deepspeed": None, **values})
    return Run(own, settings, own.explicit, Strategy("single", 1, None, "none"), device, {})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is as many bytes as a test says; PLANNER answers that max_length is what a run takes."""
    monkeypatch.setattr(predicted, "PLANNER", ("-c", ANSWERS))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")

    def of(total: int) -> None:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (total, total))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    return of


def test_a_run_is_planned_refused_and_rehearsed(gpu, capsys):
    gpu(1000)
    with predicted.planning(run_to_plan()) as planned:
        assert planned().peak_memory_bytes == 512
    assert "plan          it fits" in capsys.readouterr().out
    gpu(500)
    with pytest.raises(Refusal, match="too large"), predicted.planning(run_to_plan()) as planned:
        planned()
    (found,) = predicted.planned_findings(run_to_plan(), {})
    assert (found.code, found.level) == ("ZR816", "error")
    with predicted.planning(run_to_plan(ignore=["ZR816"])) as planned:
        assert planned().peak_memory_bytes == 512
    assert "warning (ignored): too large [ZR816]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "values", "planned"),
    [
        ("cuda", {"skip_plan": True}, False),
        ("cuda", {"skip_plan": True, "predict": True}, True),  # and compared with no GPU
        ("cpu", {"predict": False}, False),
        ("cpu", {"predict": True}, True),
    ],
)
def test_when_a_run_is_planned(gpu, device, values, planned):
    gpu(1)
    run = run_to_plan(device, **values)
    with predicted.planning(run) as plan:
        assert (plan() is not None) == planned
    assert predicted.planned_findings(run, {}) == []


def test_a_planner_that_fails_says_why_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(predicted, "PLANNER", ("-c", "raise ValueError('a bug of ours')"))
    failed = pytest.raises(RuntimeError, match=r"(?s)--skip_plan.*ValueError: a bug of ours")
    with failed, predicted.planning(run_to_plan("cpu")) as planned:
        planned()


def test_a_run_that_fails_while_it_is_planned_leaves_no_planner(monkeypatch):
    """Leaving waits for the process, which would never end by itself."""
    monkeypatch.setattr(predicted, "PLANNER", ("-c", "import signal; signal.pause()"))
    with pytest.raises(OSError, match="rows"), predicted.planning(run_to_plan("cpu")):
        raise OSError("rows")


def test_check_on_a_machine_with_a_gpu_says_it(gpu, monkeypatch, tmp_path, capsys):
    gpu(100)
    small = write_recipe(tmp_path)
    get_accelerator()  # DeepSpeed keeps the first answer for good: not that of the card that is made up here
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(preflight, "machine_findings", lambda *arguments: [])
    assert cli.main(["check", str(small), "--output_dir", str(tmp_path / "out")]) == 2
    assert "refused: too large" in capsys.readouterr().out
    assert cli.main(["check", str(small), "--output_dir", str(tmp_path / "out"), "--skip_plan", "true"]) == 0


def test_one_rank_plans_for_all_cards_and_every_rank_is_refused(two, tmp_path):
    argv = [str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero2.json"]
    first, second = two.run(plan_cases.plan_for_small_gpus, argv=argv, program=ANSWERS, capacities=[1000, 60])
    assert first["refused"] == second["refused"] == ["ZR816"]
    assert (first["started"], second["started"]) == (1, 0)
    fits = two.run(plan_cases.plan_for_small_gpus, argv=argv, program=ANSWERS, capacities=[1000, 128])
    assert [found["peak"] for found in fits] == [128, 128]


@pytest.mark.grid
def test_a_planned_run_on_cpus_carries_states_like_those_measured(two, tmp_path):
    argv = [str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero3.json"]
    found = two.run(cases.train, argv=[*argv, "--predict", "true"])[0]["metrics"]
    planned, measured = found["predicted"]["model_state_bytes"], found["model_state_bytes"][0]
    assert found["predicted"]["source"] in ("formulas", "engine")
    for part in ("params", "optimizer"):
        assert measured[part] == pytest.approx(planned[part], rel=0.02)  # padding aside


# predictions: kept, limited in time, by formulas where a simulation fails


def test_a_simulation_is_kept_for_the_same_job_and_the_same_versions(tmp_path, monkeypatch):
    simulated = []

    def simulate(jobs, deadline, ready):
        simulated.extend(jobs)
        for one in jobs:
            ready(one, made_up(one, GB))

    def predict(wanted, folder=tmp_path):
        return Predictor(folder=folder)(wanted)  # as a later program does

    monkeypatch.setattr(simulation, "simulate", simulate)
    first = predict(job("zero2"))
    assert predict(job("zero2")) == first and len(simulated) == 1
    predict(job("zero3"))
    predict(job("zero2", max_length=64))
    assert len(simulated) == 3
    monkeypatch.setattr("zero_recipes.tools.plan.predict.versions", lambda: {"torch": "another"})
    predict(job("zero2"))
    assert len(simulated) == 4
    for path in tmp_path.glob("*.json"):
        path.write_text('{"half')  # a full disk may leave that
    assert predict(job("zero2")).allocated_peak_bytes == GB and len(simulated) == 5
    (tmp_path / "file").write_text("")
    assert predict(job("zero2"), tmp_path / "file") == first  # cannot be kept, is answered


def test_the_time_of_all_simulations_together_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "WORKER", ("-c", "import signal; signal.pause()"))
    predict = Predictor(folder=tmp_path / "plans", seconds=0.01)
    for name in ("zero1", "zero2"):
        found = predict(job(name))
        assert found.source == "formulas"
        assert found.notes[0] == f"{name} uses formulas, because the simulations took longer than 0 s."
    assert not (tmp_path / "plans").exists()  # nothing was kept for a later program


def test_what_was_simulated_in_time_counts_and_the_rest_is_by_formulas(monkeypatch, tmp_path):
    predict = Predictor(folder=tmp_path, seconds=1000)
    told = []

    def simulate(jobs, deadline, ready):
        ready(jobs[0], made_up(jobs[0], GB))
        predict.deadline = 0  # and the time is over
        for late in jobs[1:]:
            ready(late, "exit code -15")

    monkeypatch.setattr(simulation, "simulate", simulate)
    jobs = [job("zero1"), job("zero2"), job("zero3")]
    assert predict.known(jobs[0]).source == "formulas"
    predict.prepare(jobs, lambda one, left: told.append((one.strategy, left)))
    assert told == [("zero1", 2), ("zero2", 1), ("zero3", 0)]
    assert [predict(one).source for one in jobs] == ["engine", "formulas", "formulas"]
    assert "longer than 1000 s" in predict(jobs[2]).notes[0] and len(list(tmp_path.iterdir())) == 1
    assert predict(job("zero0")).source == "formulas"  # no process is started for it


def test_a_simulation_that_crashes_is_answered_by_formulas_with_its_error(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "WORKER", ("-c", "raise SystemExit('a library has changed')"))
    found = Predictor(folder=tmp_path)(job("zero2"))
    assert found.source == "formulas"
    assert found.notes[0] == "zero2 uses formulas, because its simulation failed (a library has changed)."
