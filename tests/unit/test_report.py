"""The report on made-up runs: each number, each verdict in both directions, and the files that are written."""

import io
import json
import math
import re
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.report_runs import GPU, LOSSES, MIB, SPEED, metrics, on_cpu, oom, sample, save, sweep
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.metrics.schema import ContractError, Metrics
from zero_recipes.tools import main as cli
from zero_recipes.tools.report import read, tables
from zero_recipes.tools.report.judge import bottom_line, judge_runs
from zero_recipes.tools.report.page import write_report
from zero_recipes.training.card import write_card


def verdict(runs, word):
    """The judgement whose question contains `word`."""
    return next(judgement for judgement in judge_runs(runs) if word in judgement.question)


def written(folder, width=100):
    """The page and what was printed on a terminal."""
    console = Console(width=width, file=io.StringIO())
    return write_report(folder, console).read_text(encoding="utf-8"), console.file.getvalue()


def test_runs_come_in_the_order_of_the_stages(tmp_path, monkeypatch):
    for name in ("zero3", "zero0", "ddp", "zero2_offload", "zero1"):
        save(tmp_path / name, metrics(name))
    save(tmp_path / "full", metrics("zero2"))
    save(tmp_path, metrics("zero1"))
    runs = read_runs(tmp_path)
    assert [run.label for run in runs][:4] == ["ddp", "zero0", "zero1", "zero3"]
    assert [run.label for run in read.single_runs(runs)] == sorted(["full", tmp_path.name])
    monkeypatch.chdir(tmp_path / "zero1")
    assert [run.compared for run in read_runs(Path())] == [True], "a relative folder has a name too"


def test_a_bad_file_is_named_with_its_key_or_line(tmp_path):
    for key, change in (("strategy", {"strategy": None}), ("loss_history.1", {"loss_history": [1.0, "low"]})):
        save(tmp_path / "zero1", metrics("zero1") | change)
        with pytest.raises(ContractError) as error:
            read_runs(tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'zero1' / 'metrics.json'}: {key}: ")
    save(tmp_path / "zero1", metrics("zero1"), [sample(prompt="go \u2028 on")] * 2)
    assert [read.prompt for read in read_runs(tmp_path)[0].samples] == ["go \u2028 on"] * 2
    broken = sample()
    del broken["prompt"]
    save(tmp_path / "zero1", metrics("zero1"), [sample(), broken])
    with pytest.raises(ContractError, match=r"samples\.jsonl line 2: prompt: Field required"):
        read_runs(tmp_path)


@pytest.mark.parametrize("files", [{}, {"metrics.json": "{"}, {"sweep.json": '{"schema": 2'}])
def test_a_folder_without_a_run_that_can_be_read_is_refused(tmp_path, capsys, files):
    if "sweep.json" in files:
        save(tmp_path / "ddp", metrics("ddp"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for folder in (tmp_path, tmp_path / "nothing"):
        assert cli.main(["report", str(folder)]) == 2 and "ZR560" in capsys.readouterr().err


def test_whatever_is_not_known_of_a_run_there_is_a_report(tmp_path):
    optional = [key for key, field in Metrics.model_fields.items() if not field.is_required()]
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        left_out = optional if strategy == "ddp" else ()
        save(tmp_path / strategy, {key: value for key, value in metrics(strategy).items() if key not in left_out})
    runs = read_runs(tmp_path)
    for number, key in product(range(len(runs)), optional):
        unknown = runs[number].model_copy(update={key: Metrics.model_fields[key].default})
        changed = [*runs[:number], unknown, *runs[number + 1 :]]
        assert judge_runs(changed) and tables.tables_of(changed)
    written(tmp_path)


def test_rows_hold_what_was_measured(tmp_path):
    by_name = {row["label"]: row for row in read.table_rows(sweep(tmp_path))}
    zero1 = by_name["zero1"]
    assert (zero1["params_bytes"], zero1["grads_bytes"], zero1["optimizer_bytes"]) == (2_000_000, 2_000_000, 6_000_000)
    assert zero1["state_bytes"] == zero1["textbook_bytes"] == 10_000_000
    assert zero1["relative_speed"] == pytest.approx(0.98)
    assert (zero1["communication_bytes"], zero1["communication_in_phi"], zero1["paper_in_phi"]) == (6_000_000, 3, 2)
    assert zero1["final_loss"] == pytest.approx(1.4) and zero1["peak_allocated_bytes"] == 40 * MIB
    assert (zero1["planned_peak_bytes"], zero1["planned_state_bytes"]) == (44 * MIB, 4 * MIB)
    assert (zero1["non_padding_share"], zero1["supervised_share"]) == pytest.approx((6 / 9, 3 / 9))
    assert by_name["zero0"]["state_over_textbook"] == 1.25
    assert by_name["ddp"]["state_over_textbook"] == 1  # autocast keeps fp32 weights, gradients and Adam: 16Ψ
    assert by_name["ddp"]["communication_in_phi"] == 4


def test_the_largest_rank_and_the_fullest_accelerator_are_shown(tmp_path):
    small = {"params": 10, "grads": 10, "optimizer": 10, "offloaded_host": 5, "offloaded_disk": 0}
    large = {"params": 1, "grads": 2, "optimizer": 30, "offloaded_host": 7, "offloaded_disk": 1}
    peaks = [{"allocated": 5, "reserved": 9, "rss": 90}, {"allocated": 8, "reserved": 9, "rss": 70}]
    name = "zero2_offload"
    save(tmp_path / name, metrics(name, model_state_bytes=[small, large], peak_memory_bytes=peaks))
    (row,) = read.table_rows(read_runs(tmp_path))
    assert (row["state_bytes"], row["host_bytes"], row["disk_bytes"]) == (33, 7, 1)
    assert (row["peak_allocated_bytes"], row["resident_bytes"], row["textbook_bytes"]) == (8, 90, None)
    headers = [column.header for column in tables.runs_table(read_runs(tmp_path)).memory]
    assert any("Peak" in header for header in headers) and not any("Resident" in header for header in headers)


def test_without_ddp_the_baseline_is_zero0_and_without_both_there_is_none(tmp_path):
    save(tmp_path / "ddp", oom("ddp"))
    runs = sweep(tmp_path, strategies=("zero0", "zero1"))
    assert [row["relative_speed"] for row in read.table_rows(runs)] == [None, 1, pytest.approx(980 / 990)]
    assert read.baseline([run for run in runs if run.label == "zero1"]) is None


@pytest.mark.parametrize(
    ("word", "changes", "expected", "said"),
    [
        ("same conditions", {}, "yes", "5 rows with the same settings"),
        ("same conditions", {"zero3": {"micro_batch_size": 1}}, "no", "micro_batch_size (1, 4)"),
        ("same conditions", {"zero3": {"device": "cpu"}}, "no", f"device ({GPU}, cpu)"),
        ("same conditions", {"zero3": {"tokens": {"all": 8000, "non_padding": 1, "supervised": 1}}}, "no",
         "tokens trained on (8,000, 9,000)"),
        ("same loss", {}, "yes", "Equal to the last bit over 6 steps."),
        ("same loss", {"zero1": {"loss_history": [2.0, 1.8, None]}}, "no", "not finite: zero1 from step 3."),
        ("same loss", {"zero1": {"loss_history": LOSSES[:3]}}, "yes", "Only steps 1 to 3 are compared"),
    ],
)  # fmt: skip
def test_each_question_has_both_answers(tmp_path, word, changes, expected, said):
    judgement = verdict(sweep(tmp_path, changes), word)
    assert (judgement.verdict, said in judgement.measured) == (expected, True), judgement.measured


@pytest.mark.parametrize(
    ("precision", "changed", "factor", "expected", "pair"),
    [
        ("fp32", "zero2", 1 + 5e-6, "yes", "ddp and zero2"),
        ("fp32", "zero2", 1 + 5e-5, "no", "ddp and zero2"),
        ("bf16", "ddp", 1.01, "yes", "zero0 and ddp"),
        ("bf16", "zero3", 1 + 5e-2, "no", "ddp and zero3"),
    ],
)
def test_losses_are_judged_by_precision(tmp_path, precision, changed, factor, expected, pair):
    changes = {name: {"precision": precision} for name in SPEED}
    changes[changed] |= {"loss_history": [loss * (factor if index == 3 else 1) for index, loss in enumerate(LOSSES)]}
    judgement = verdict(sweep(tmp_path, changes), "same loss")
    assert judgement.verdict == expected
    assert f"at step 4 between {pair} (limit" in judgement.measured


def test_losses_name_the_runs_whose_masters_began_rounded(tmp_path):
    changes = {name: {"exact_master_weights": name != "zero3"} for name in SPEED}
    assert "Master weights of zero3 began rounded" in verdict(sweep(tmp_path, changes), "same loss").measured


def test_a_resumed_run_without_history_is_compared_step_by_step_from_its_first(tmp_path):
    """Its checkpoint carried no history: its first loss is that of step 4, not of step 1."""
    resumed = {"first_step": 4, "loss_history": LOSSES[3:]}
    runs = sweep(tmp_path / "late", {"zero1": resumed})
    judgement = verdict(runs, "same loss")
    assert judgement.verdict == "yes" and judgement.measured.startswith("Equal to the last bit over 3 steps.")
    assert "Only steps 4 to 6 are compared" in judgement.measured
    (late,) = (run for run in runs if run.label == "zero1")
    assert late.losses == {4: LOSSES[3], 5: LOSSES[4], 6: LOSSES[5]}
    diverged = {"first_step": 4, "loss_history": [1.4, None]}
    assert "zero1 from step 5." in verdict(sweep(tmp_path / "nan", {"zero1": diverged}), "same loss").measured
    apart = {"ddp": {"first_step": 7}}
    assert verdict(sweep(tmp_path / "apart", apart), "same loss").verdict == "cannot tell"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A sweep with a row out of memory, an offloaded one, and a full run beside it."""
    folder = tmp_path_factory.mktemp("report")
    save(folder / "ddp", oom("ddp"))
    save(folder / "zero2_offload", metrics("zero2_offload"))
    evaluations = [{"step": 2, "loss": 1.75}, {"step": 4, "loss": 1.5}]
    asked = "Below is an instruction.\n\n### Instruction:\nprompt number"
    many = [*(sample(prompt=f"{asked} {number} <i>") for number in range(14)), sample(prompt="alone\n\nother")]
    many.insert(3, many.pop())
    save(folder / "full", metrics("zero2", eval_history=evaluations), many)
    write_card(folder / "full")  # and loss.png
    sweep(folder, {"zero1": {"loss_history": [2.0, math.nan]}}, strategies=("zero0", "zero1", "zero2", "zero3"))
    page, printed = written(folder)
    return folder, page, printed


def test_the_page_fetches_nothing_and_escapes_what_models_and_people_wrote(report):
    folder, page, _ = report
    assert min(path.stat().st_size for path in folder.glob("*.png")) > 10_000, "an empty picture"
    assert re.findall(r'(?:src|href)\s*=\s*"(?!data:image/png;base64,)', page) == []
    assert re.findall(r"<link|<script|<iframe|@import|url\(|<i>", page) == []
    assert page.count('src="data:image/png;base64,') == 4
    assert "prompt number 10 &lt;i&gt;" in page and "prompt number 11" not in page and "alone\n\nother" in page
    assert "Below is an instruction." not in page and "###" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "CUDA out of memory &lt;sorry&gt;" in page


def test_the_page_has_samples_failures_and_the_full_run(report):
    _, page, _ = report
    heads = re.findall(r"<h2>([^<]+)</h2>", page)
    assert heads == ["Before and after", "Pictures", "Judgement", "Runs that did not finish", "Comparison", "Full run"]
    assert "15 prompts, answered before and after the run named full; the first 12 are shown" in page
    assert re.search(r"token_f1</td><td class=\"number\">0.100</td><td class=\"number\">0.500", page)
    assert re.search(r"<td class=\"number\">4</td><td class=\"number\">1.5000</td>", page)
    for text in ("ddp: oom", "phase train, rank 1, signal SIGKILL", "optimizer states: 537 MB"):
        assert text in page


def test_the_report_begins_with_what_it_comes_to(report, tmp_path):
    folder, page, printed = report
    content = json.loads((folder / "report.json").read_text())
    line = content["bottom_line"]
    assert line.startswith("Take zero2 (970 tokens/s): it is as fast as zero1 and zero0 within 5 %, and none ")
    assert line.endswith("Not finished: ddp (oom).")
    assert "Losses agree: no. The loss is not finite" in line
    sent = "zero1 3.00 (by the ZeRO paper's formula 2.00), zero2 3.00 (2.00), zero2_off"
    assert f"in sizes of the weights: {sent}" in line, "zero0 and zero3 are as it says"
    shown = " ".join(printed.split()).replace(" - ", " ")
    assert shown.startswith(f"- {line}") and page.index("within 5 %") < page.index("<h2>Pictures")
    speeds = {name: {"tokens_per_second": {"non_padding": rate}} for name, rate in (("zero1", 800.0), ("zero2", 700.0))}
    runs = sweep(tmp_path, speeds)
    assert bottom_line(runs)[0].startswith("Take ddp (1,000 tokens/s): it is as fast as zero0 within 5 %")
    speeds["zero0"] = {"tokens_per_second": {"non_padding": 940.0}}
    runs = sweep(tmp_path, speeds)
    assert bottom_line(runs)[0].startswith("Take ddp (1,000 tokens/s): it fits and is the fastest.")


def test_volumes_are_compared_with_the_papers_where_both_count_the_same(tmp_path):
    """ZeRO++'s paper counts what crosses between nodes, a run all that is sent."""
    more = {"communication_bytes_per_step": {"all_gather": 8_000_000, "reduce_scatter": 2_000_000}}
    strategies = ("zero0", "zero3", "zero3_hpz", "zero3_plus_plus")
    runs = sweep(tmp_path, {"zero3": more}, strategies=strategies)
    by_name = {row["label"]: row for row in read.table_rows(runs)}
    assert [by_name[name]["paper_in_phi"] for name in strategies] == [2, 3, 2, 0.75]
    said = [text for text in bottom_line(runs) if "Sent in a step" in text]
    sent = "zero3 5.00 (by the ZeRO paper's formula 3.00)"
    assert said == [f"Sent in a step, in sizes of the weights: {sent}. The libraries are built so."]


def test_no_strategy_is_advised_by_the_speed_of_cpus(tmp_path):
    advice = bottom_line(sweep(tmp_path, make=on_cpu))[0]
    assert advice.startswith("Take zero3 for the least memory: 8.00 MB of model states. These runs on CPUs say nothing")
    assert "zero-recipes plan RECIPE.yaml --gpus 2" in advice


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ('{"recommendation": {"strategy": "zero2"}, "bottom_line": "zero2 fits x on 2 x h100-80gb: 1 s."}',
         "Take zero2, by zero-recipes plan: zero2 fits x on 2 x h100-80gb: 1 s. These runs on CPUs say nothing"),
        ('{"recommendation": null, "bottom_line": "nothing fits"}', "Take zero3 for the least memory"),
        ("", "Take zero3 for the least memory"),
    ],
)  # fmt: skip
def test_a_plan_beside_runs_on_cpus_says_what_to_take_and_none_beside_runs_on_gpus(tmp_path, text, first):
    for name, make in (("cpu", on_cpu), ("gpu", metrics)):
        sweep(tmp_path / name, make=make)
        (tmp_path / name / "plan.json").write_text(text)
        page, printed = written(tmp_path / name, width=300)
        expected = first if name == "cpu" else "Take zero2 (970 tokens/s)"
        assert printed.startswith(f"- {expected}") and expected in page


def test_the_json_is_strict_and_has_the_numbers_unrounded(report):
    content = json.loads((report[0] / "report.json").read_text(), parse_constant=pytest.fail)
    by_name = {row["label"]: row for row in content["rows"]}
    assert content["baseline"] == "zero0" and by_name["zero1"]["final_loss"] is None  # not finite
    assert by_name["zero3"]["relative_speed"] == 750 / 990
    assert [row["label"] for row in content["rows"] if not row["compared"]] == ["full"]
    assert [entry["verdict"] for entry in content["judgements"] if "same loss" in entry["question"]] == ["no"]
    named = [row["label"] for row in content["rows"]]
    assert sorted(named) == sorted(["ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "full"])


def test_a_cpu_page_says_so_and_one_run_alone_has_no_bars(report, tmp_path):
    assert "CPU processes" not in report[1]
    save(tmp_path / "mine", on_cpu("zero2"))
    page, printed = written(tmp_path)
    assert "on CPUs say nothing" in page and "CPU processes, no GPU" in page
    assert "on CPUs say nothing" in " ".join(printed.split())
    assert not [*tmp_path.glob("*.png")]
    assert ">Run mine<" in page and "<h2>Comparison" not in page


def test_only_failures_still_make_a_report(tmp_path):
    save(tmp_path / "zero3", {"schema": 1, "status": "failed", "error": "x", "name": "z", "strategy": "zero3"})
    page, _ = written(tmp_path)
    assert "zero3: failed" in page and (tmp_path / "loss.png").is_file()
