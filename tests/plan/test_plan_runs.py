"""The plan of a run that starts: refused on a GPU where it does not fit, kept in metrics.json, shown in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator

from tests.helpers.plan_jobs import GB, ROOT, job, made_up, recipe, strategies
from tests.helpers.report_runs import GPU, metrics, on_cpu, save
from tests.helpers.tiny import write_recipe
from zero_recipes.checks import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config.ds_view import DsConfig
from zero_recipes.config.run import RunConfig
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.failure import failed_row
from zero_recipes.metrics.prediction import PredictedMetrics
from zero_recipes.plan import gate
from zero_recipes.plan.cards import Card
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.overheads import FILE, overheads, read_overheads, write_fitted
from zero_recipes.plan.predict import Predictor
from zero_recipes.plan.simulator import parent as simulation
from zero_recipes.report import read_runs, write_report
from zero_recipes.report.rows import table_rows


@pytest.fixture
def ask(monkeypatch):
    """Plans a run of recipes/pythia.yaml on two GPUs of 80 GB; `need`: GB by job, or what the prediction raises.

    `compared`: whether plans were compared with a GPU; `others`: GB that other processes hold; `states`: GB.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gate.Host, "memory", lambda self: (1000 * GB, "a stand-in"))

    def plan(
        need,
        strategy="zero2",
        device="cuda",
        source="engine",
        asked=None,
        rehearse=False,
        compared=True,
        others=0,
        states=None,
        **values,
    ):
        card = Card(0, "here", 80 * GB, others * GB)
        monkeypatch.setattr(gate.cards, "card", lambda index=None: card)
        monkeypatch.setattr(gate.cards, "cards_here", lambda processes: [card])
        monkeypatch.setattr(gate, "overheads", lambda: SimpleNamespace(measured=compared))

        def predict(job):
            if asked is not None:
                asked.append(job)
            taken = need(job)
            held = None if states is None else states * GB
            return made_up(job, taken * GB, held, overhead=5 * GB).model_copy(update={"source": source})

        monkeypatch.setattr(gate, "Predictor", lambda limit: predict)
        config = strategies()[strategy]
        own = recipe("pythia")
        settings = own.settings.replace(**{"deepspeed": config, **values})
        in_force = Strategy(strategy, 2, None if config is None else DsConfig(config), "a file")
        run = RunConfig(own, settings, own.given, in_force, device, Path("out"))
        if rehearse:
            return gate.rehearsed(run, {})
        with gate.planning(run) as planned:
            return planned()

    return plan


def test_a_run_that_fits_carries_its_plan(ask, capsys):
    found = ask(lambda job: 70)
    assert found.peak_memory_bytes == 70 * GB and found.source == "engine"
    assert found.model_state_bytes.params == 35 * GB and sum(found.at_peak.values()) == 70 * GB
    assert "70.0 GB at the peak, by the engine, simulated: fits into 80.0 GB" in capsys.readouterr().out
    assert PredictedMetrics.model_validate(json.loads(found.model_dump_json())) == found


def test_a_run_that_does_not_fit_is_refused_with_what_would(ask):
    with pytest.raises(Refusal) as refusal:
        ask(lambda job: 70 if job.recomputes else 90)
    (finding,) = refusal.value.findings
    assert (finding.level, finding.scope) == ("error", "run")
    assert finding.what == "zero2 on 2 GPUs needs at least 90.0 GB on each, and this one has 80.0 GB"
    assert "peak in backward: params 45.0 GB, activations 45.0 GB" in finding.why
    assert "accelerate_configs/zero2.yaml --num_processes 2 run_sft.py" in finding.fix
    assert "--activation_checkpointing true" in finding.fix and "--skip_plan true" in finding.fix


def test_a_plan_that_was_never_compared_with_a_gpu_warns(ask, capsys):
    assert ask(lambda job: 70 if job.recomputes else 90, compared=False).peak_memory_bytes == 90 * GB
    said = capsys.readouterr().out
    assert "warning: zero2 on 2 GPUs needs at least 90.0 GB on each, and this one has 80.0 GB [ZR816]" in said
    assert "no plan has been compared with a GPU yet" in said and "--activation_checkpointing true" in said
    (finding,) = ask(lambda job: 90, rehearse=True, compared=False)
    assert (finding.code, finding.level) == ("ZR816", "warning")


def test_committed_comparisons_make_it_a_refusal(ask, tmp_path):
    path = tmp_path / "overheads.yaml"
    path.write_text(FILE.read_text())
    levels = []
    for fitted in ({}, {"context": (7e8, "a GPU")}, {"fragmentation": (1.1, "a GPU")}):
        write_fitted(fitted, path)
        measured = read_overheads(path).measured
        (finding,) = ask(lambda job: 90, rehearse=True, compared=measured)
        levels.append(finding.level)
    shipped = "error" if overheads().measured else "warning"  # a GPU's context and fragmentation: both are needed
    assert levels == [shipped, shipped, "error"]


def test_model_states_larger_than_the_card_are_refused_whatever_was_compared(ask):
    for rehearse in (False, True):
        asked = []
        try:
            (finding,) = ask(lambda job: 100, states=81, compared=False, others=30, asked=asked, rehearse=rehearse)
        except Refusal as refusal:
            (finding,) = refusal.findings
        assert (finding.code, finding.level) == ("ZR840", "error")
        assert finding.what == "zero2 on 2 GPUs keeps 81.0 GB of model states on each, and this one has 80.0 GB"
        assert finding.why.startswith("weights 81.0 GB: none of it depends on the batch.")
    # what others hold may be freed: that is no certainty
    assert ask(lambda job: 90, states=79, compared=False, others=30).peak_memory_bytes == 90 * GB


def test_formulas_are_certain_of_weights_and_adam_before_anything_is_simulated(ask):
    asked = []
    with pytest.raises(Refusal) as refusal:
        ask(lambda job: 10, "zero0", asked=asked, compared=False)
    (finding,) = refusal.value.findings
    assert finding.code == "ZR840" and finding.why.startswith("weights 13.7 GB, optimizer 82.3 GB: ")
    assert asked[0].strategy == "zero1"  # only what would fit is simulated
    assert ask(lambda job: 10, "zero0", optim="adamw_bnb_8bit", compared=False)


@pytest.mark.parametrize(
    ("values", "block", "parts"),
    [
        ({}, {}, {"weights", "optimizer"}),
        ({"optim": "sgd"}, {}, {"weights"}),
        ({"load_in_4bit": True, "use_peft": True}, {}, set()),
        ({}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"weights"}),
        ({}, {"optimizer": {"type": "Lion"}}, {"weights"}),
        ({}, {"torch_autocast": {"enabled": True}}, {"weights"}),
        ({}, {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, set()),
    ],
)
def test_formulas_are_certain_of_nothing_else(values, block, parts):
    one = job("zero0", **values)
    one = replace(one, ds_config=one.ds_config | block)
    found = gate.certain_states(one, predict_by_formulas(one))
    assert {part for part, held in found.items() if held} == parts


def test_what_other_processes_hold_is_named(ask, capsys):
    with pytest.raises(Refusal) as refusal:
        ask(lambda job: 70, others=12)
    (finding,) = refusal.value.findings
    assert "needs at least 70.0 GB on each, and this one has 80.0 GB, 12.0 GB of it held by other" in finding.what
    assert finding.fix.startswith("End what else runs on that GPU (nvidia-smi names it). ")
    assert ask(lambda job: 50, others=12) and "fits into 68.0 GB" in capsys.readouterr().out


def test_where_nothing_helps_that_is_said(ask):
    with pytest.raises(Refusal) as refusal:
        ask(lambda job: 90)
    assert "No change that was tried makes it fit" in refusal.value.fix


def test_a_tight_run_goes_on(ask, capsys):
    assert ask(lambda job: 78).peak_memory_bytes == 78 * GB
    said = capsys.readouterr().out
    assert "tight in" in said and "warning" not in said


def test_formulas_warn_and_do_not_refuse(ask, capsys):
    assert ask(lambda job: 90, source="formulas").peak_memory_bytes == 90 * GB
    said = capsys.readouterr().out
    assert "warning: zero2 on 2 GPUs needs at least" in said and "textbook formulas" in said


def test_skip_plan_asks_nothing(ask):
    asked = []
    assert ask(lambda job: 500, skip_plan=True, asked=asked) is None and asked == []
    # asked for by name it is planned, and still not refused
    assert ask(lambda job: 500, skip_plan=True, predict=True, asked=asked) and asked


def test_on_cpus_a_run_is_planned_only_if_asked_and_never_refused(ask):
    asked = []
    assert ask(lambda job: 500, device="cpu", asked=asked) is None and asked == []
    assert ask(lambda job: 500, device="cpu", asked=asked, predict=True).peak_memory_bytes == 500 * GB
    assert [job.device for job in asked] == ["cpu"]


def test_a_plan_that_cannot_be_made_stops_no_run(ask, capsys):
    def broken(job):
        raise RuntimeError("unknown operator\nand a traceback")

    assert ask(broken) is None
    assert "plan          none could be made: unknown operator\n" in capsys.readouterr().out
    assert ask(lambda job: 70, model_name_or_path="no/body") is None
    assert "config.json of no/body" in capsys.readouterr().out


def test_a_rehearsal_finds_the_same(ask):
    (finding,) = ask(lambda job: 90, rehearse=True)
    assert finding.level == "error" and "needs at least" in finding.what
    assert ask(lambda job: 70, rehearse=True) == []
    assert ask(lambda job: 90, rehearse=True, device="cpu", predict=True) == []


def test_check_on_a_machine_with_a_gpu_says_it(ask, monkeypatch, tmp_path, capsys):
    small = write_recipe(tmp_path)
    ask(lambda job: 90, device="cpu")  # sets the prediction
    get_accelerator()  # DeepSpeed keeps the first answer for good: not that of the card that is made up here
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(preflight, "machine_findings", lambda *arguments: [])
    assert cli.main(["check", str(small), "--output_dir", str(tmp_path / "out")]) == 2
    assert "refused: single on 1 GPU needs at least 90.0 GB" in capsys.readouterr().out
    assert cli.main(["check", str(small), "--output_dir", str(tmp_path / "out"), "--skip_plan", "true"]) == 0


def test_a_simulation_is_kept_for_the_same_job_and_the_same_versions(tmp_path, monkeypatch):
    simulated = []

    def simulate(jobs, done, limit):
        simulated.extend(jobs)
        return [made_up(one, GB) for one in jobs]

    def predict(wanted, folder=tmp_path):
        return Predictor(folder=folder)(wanted)  # as a later program does

    monkeypatch.setattr(simulation, "simulate", simulate)
    first = predict(job("zero2"))
    assert predict(job("zero2")) == first and len(simulated) == 1
    predict(job("zero3"))
    predict(job("zero2", max_length=64))
    assert len(simulated) == 3
    monkeypatch.setattr("zero_recipes.core.environment.versions", lambda: {"torch": "another"})
    predict(job("zero2"))
    assert len(simulated) == 4
    for path in tmp_path.glob("*.json"):
        path.write_text('{"half')  # a program that died while writing would leave no file; a disk may
    assert predict(job("zero2")).allocated_peak_bytes == GB and len(simulated) == 5
    (tmp_path / "file").write_text("")
    assert predict(job("zero2"), tmp_path / "file") == first  # cannot be kept, is answered


def test_a_refused_run_of_a_sweep_is_a_row(ask, tmp_path):
    with pytest.raises(Refusal) as refusal:
        ask(lambda job: 90)
    row = failed_row(tmp_path, "zero2", 1, f"loading\n{refusal.value}\n")
    assert row.status == "refused" and "needs at least 90.0 GB" in row.error


# the report

BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 512}
ZERO2 = SimpleNamespace(strategy="zero2", zero_stage=2, world_size=2, settings=Settings(BATCH))
PLANNED = {
    "source": "engine",
    "peak_memory_bytes": 44 * 2**20,
    "at_peak": made_up(ZERO2, 44 * 2**20).at_peak,
    "reserved_bytes": {"low": 44 * 2**20, "high": 60 * 2**20},
    "model_state_bytes": {"params": 2**20, "grads": 2**20, "optimizer": 2**21},
}


def test_the_report_puts_planned_beside_measured(tmp_path):
    hardware = {"gpu": GPU, "gpu_memory_bytes": 80 * 2**20}
    for strategy in ("zero2", "zero3"):
        save(tmp_path / strategy, metrics(strategy, predicted=PLANNED, hardware=hardware))
    row = table_rows(read_runs(tmp_path))[0]
    assert row["planned_peak_bytes"] == 44 * 2**20 and row["planned_state_bytes"] == 4 * 2**20
    page = write_report(tmp_path).read_text()
    assert "Planned and measured memory" in page and "10.0 %" in page  # 44 MiB planned, 40 measured
    assert "planned memory of each strategy" in page and (tmp_path / "plan.png").is_file()
    assert "| Planned states |" in (tmp_path / "report.md").read_text().replace("\n", " ")


def test_on_cpus_states_stand_beside_states_and_no_peak_beside_resident_memory(tmp_path):
    save(tmp_path / "zero2", on_cpu("zero2", predicted=PLANNED))
    row = table_rows(read_runs(tmp_path))[0]
    assert row["planned_state_bytes"] == 4 * 2**20 and row["planned_peak_bytes"] is None
    write_report(tmp_path)
    written = (tmp_path / "report.md").read_text()
    assert "Planned states" in written and "Planned peak" not in written
    assert not (tmp_path / "plan.png").exists()


def test_runs_without_a_plan_show_none(tmp_path):
    save(tmp_path / "zero2", metrics("zero2", predicted=None))
    assert "Planned" not in (write_report(tmp_path).parent / "report.md").read_text()


# in a process group


def test_one_rank_plans_for_the_smallest_card_and_every_rank_is_refused(two, tmp_path):
    argv = [str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero2.json"]
    first, second = two.run("plan_for_small_gpus", argv=argv, capacities=[50, 50])
    assert first["asked"] and set(first["asked"]) == {0} and second["asked"] == []
    assert first["refused"] == second["refused"] and "4 GPUs" in first["refused"][0]["fix"]
    assert "this one has 50 B" in first["refused"][0]["what"]
    first, second = two.run("plan_for_small_gpus", argv=argv, capacities=[100, 60])
    assert first["refused"] == second["refused"] and set(first["asked"]) == {0} and second["asked"] == []
    (finding,) = first["refused"]
    assert finding["code"] == "ZR816" and "at least 100 B on each, and rank 1's on host1 has 60 B" in finding["what"]
    alone = two.run("plan_for_small_gpus", argv=argv, capacities=[49, 200])
    assert [found["refused"][0]["code"] for found in alone] == ["ZR840", "ZR840"]
    fits = two.run("plan_for_small_gpus", argv=argv, capacities=[100, 101])
    assert [found["peak"] for found in fits] == [100, 100]


def test_a_planned_run_on_cpus_carries_states_like_those_measured(two, tmp_path):
    argv = [str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero3.json"]
    found = two.run("train", argv=[*argv, "--predict", "true"])[0]["metrics"]
    planned, measured = found["predicted"]["model_state_bytes"], found["model_state_bytes"][0]
    assert found["predicted"]["source"] in ("formulas", "engine")
    for part in ("params", "optimizer"):
        assert measured[part] == pytest.approx(planned[part], rel=0.02)  # padding aside


@pytest.mark.grid
def test_fp16_is_simulated_with_the_bytes_of_bf16(monkeypatch):
    """Under every engine, those without DeepSpeed too, whose loss scaler is for real devices alone."""
    monkeypatch.chdir(ROOT)
    jobs = [job(name, name="tiny") for name in ("ddp", "zero2", "zero3")]
    in_fp16 = [each.changed(bf16=False, fp16=True) for each in jobs]
    found = simulation.simulate([*jobs, *in_fp16])
    for bf16, fp16 in zip(found[: len(jobs)], found[len(jobs) :], strict=True):
        assert (bf16.precision, fp16.precision) == ("bf16", "fp16")
        assert fp16.model_state_bytes == bf16.model_state_bytes
        assert fp16.allocated_peak_bytes == pytest.approx(bf16.allocated_peak_bytes, rel=0.01)
