"""The report on made-up runs: each number, each verdict in both directions, and the files that are written."""

import io
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.report_runs import GPU, LOSSES, MIB, PARAMETERS, SPEED, metrics, on_cpu, save
from zero_recipes.core import plot_style, units
from zero_recipes.report import ContractError, judge_runs, plots, read_runs, rows, table, write_report


def sample(before=0.1, after=0.5, loss_before=3.0, loss_after=1.0, **changes):
    return {
        "prompt": "Say <b>hello</b> & \u2028go", "before": "<script>alert(1)</script>", "after": "hello",
        "reference": "hello", "scores_before": {"token_f1": before, "reference_loss": loss_before},
        "scores_after": {"token_f1": after, "reference_loss": loss_after},
    } | changes  # fmt: skip


def sweep(folder, changes=None, make=metrics, strategies=tuple(SPEED)):
    """Runs of all strategies; `changes` maps a strategy to the keys in which it differs from `metrics`."""
    for strategy in strategies:
        save(folder / strategy, make(strategy, **(changes or {}).get(strategy, {})))
    return read_runs(folder)


def oom(strategy):
    return {
        "schema": 1, "status": "oom", "error": "CUDA out of memory <sorry>", "name": strategy, "strategy": strategy,
        "world_size": 2, "device": GPU, "model": "org/little-model", "parameters": PARAMETERS,
        "trainable_parameters": PARAMETERS, "precision": "bf16", "loss_history": [], "tokens_per_second": None,
        "peak_memory_bytes": [None, {"allocated": None, "reserved": None, "rss": None}],
        "model_state_bytes": [None, {"params": None, "grads": None, "optimizer": None}],
        "step_seconds": {"median": None, "p90": None, "warmup_steps_excluded": 2},
        "failure": {"phase": "train", "rank": 1, "signal": "SIGKILL", "cures": ["shard <more>"],
                    "largest_memory": [{"what": "optimizer states", "bytes": 512 * MIB}]},
    }  # fmt: skip


def verdict(runs, word):
    """The judgement whose question contains `word`."""
    return next(judgement for judgement in judge_runs(runs) if word in judgement.question)


# ---------------------------------------------------------------- reading


def test_runs_come_in_the_order_of_the_stages(tmp_path):
    for name in ("zero3", "zero0", "ddp", "zero2_offload", "zero1"):
        save(tmp_path / name, metrics(name))
    save(tmp_path / "full", metrics("zero2"))
    save(tmp_path, metrics("zero1"))
    runs = read_runs(tmp_path)
    assert [run.label for run in runs][:4] == ["ddp", "zero0", "zero1", "zero3"]
    assert {run.label for run in runs[4:]} == {"full", "zero2_offload", tmp_path.name}
    assert [run.label for run in rows.single_runs(runs)] == sorted(["full", tmp_path.name])


def test_a_relative_folder_still_has_a_name(tmp_path, monkeypatch):
    save(tmp_path / "zero1", metrics("zero1"))
    monkeypatch.chdir(tmp_path / "zero1")
    assert [run.compared for run in read_runs(Path())] == [True]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("tokens_per_second", lambda content: content.pop("tokens_per_second")),
        ("recipe_sha256", lambda content: content.update(recipe_sha256=None)),
        ("strategy", lambda content: content.pop("strategy")),
        ("schema", lambda content: content.update(schema=2)),
        ("step_seconds.median", lambda content: content["step_seconds"].pop("median")),
        ("model_state_bytes.0.grads", lambda content: content["model_state_bytes"][0].pop("grads")),
        ("peak_memory_bytes.1", lambda content: content.update(peak_memory_bytes=[{"rss": 5}, None])),
        ("parameters", lambda content: content.update(parameters="7B")),
        ("status", lambda content: content.update(status="fine")),
        ("loss_history.1", lambda content: content.update(loss_history=[1.0, "low"])),
    ],
)
def test_an_error_names_file_and_key(tmp_path, key, change):
    content = metrics("zero1")
    change(content)
    save(tmp_path / "zero1", content)
    with pytest.raises(ContractError) as error:
        read_runs(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'zero1' / 'metrics.json'}: {key}: ")


@pytest.mark.parametrize(("text", "said"), [("{", "not JSON"), ("[1]", "expected one JSON object, found list")])
def test_a_file_that_is_no_object_is_named(tmp_path, text, said):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ContractError, match=rf"metrics\.json: {re.escape(said)}"):
        read_runs(tmp_path)


def test_a_bad_sample_is_named_with_its_line(tmp_path):
    broken = sample()
    del broken["prompt"]
    save(tmp_path / "zero1", metrics("zero1"), [sample(), broken])
    with pytest.raises(ContractError, match=r"samples\.jsonl line 2: prompt: missing"):
        read_runs(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ContractError, match=r"no metrics\.json in"):
        read_runs(tmp_path)


def test_a_failed_row_may_be_nearly_empty(tmp_path):
    save(tmp_path / "zero3", {"schema": 1, "status": "refused", "error": "no", "name": "a", "strategy": "zero3"})
    (run,) = read_runs(tmp_path)
    (row,) = rows.table_rows([run])
    assert (run.status, row["state_bytes"], row["final_loss"], row["communication_in_phi"]) == (
        "refused",
        None,
        None,
        None,
    )


def test_samples_are_read_whole(tmp_path):
    save(tmp_path / "zero1", metrics("zero1"), [sample(), sample()])
    (run,) = read_runs(tmp_path)
    assert [read.prompt for read in run.samples] == ["Say <b>hello</b> & \u2028go"] * 2


# ---------------------------------------------------------------- numbers


def test_rows_hold_what_was_measured(tmp_path):
    by_name = {row["label"]: row for row in rows.table_rows(sweep(tmp_path))}
    zero1 = by_name["zero1"]
    assert (zero1["params_bytes"], zero1["grads_bytes"], zero1["optimizer_bytes"]) == (2_000_000, 2_000_000, 6_000_000)
    assert zero1["state_bytes"] == zero1["textbook_bytes"] == 10_000_000
    assert zero1["relative_speed"] == pytest.approx(0.98)
    assert zero1["communication_bytes"] == 6_000_000
    assert zero1["communication_in_phi"] == 3
    assert zero1["final_loss"] == pytest.approx(1.4)
    assert zero1["peak_allocated_bytes"] == 40 * MIB
    assert by_name["zero0"]["state_over_textbook"] == 1.25
    assert by_name["ddp"]["state_over_textbook"] == 1  # autocast keeps fp32 weights, gradients and Adam: 16Ψ
    assert by_name["ddp"]["communication_in_phi"] == 4


def test_the_largest_rank_and_the_fullest_accelerator_are_shown(tmp_path):
    small = {"params": 10, "grads": 10, "optimizer": 10, "offloaded_host": 5, "offloaded_disk": 0}
    large = {"params": 1, "grads": 2, "optimizer": 30, "offloaded_host": 7, "offloaded_disk": 1}
    peaks = [{"allocated": 5, "reserved": 9, "rss": 90}, {"allocated": 8, "reserved": 9, "rss": 70}]
    save(tmp_path / "zero1", metrics("zero1", model_state_bytes=[small, large], peak_memory_bytes=peaks))
    (row,) = rows.table_rows(read_runs(tmp_path))
    assert (row["state_bytes"], row["host_bytes"], row["disk_bytes"]) == (33, 7, 1)
    assert (row["peak_allocated_bytes"], row["resident_bytes"]) == (8, 90)


def test_without_ddp_the_baseline_is_zero0_and_without_both_there_is_none(tmp_path):
    save(tmp_path / "ddp", oom("ddp"))
    runs = sweep(tmp_path, strategies=("zero0", "zero1"))
    assert [row["relative_speed"] for row in rows.table_rows(runs)] == [None, 1, pytest.approx(980 / 990)]
    assert rows.baseline([run for run in runs if run.label == "zero1"]) is None


def test_an_offloaded_run_has_no_textbook_value(tmp_path):
    save(tmp_path / "zero2_offload", metrics("zero2_offload"))
    assert rows.table_rows(read_runs(tmp_path))[0]["textbook_bytes"] is None


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (152.4e6, "152 MB"),
        (63.94e9, "63.9 GB"),
        (80 * 1024**3, "85.9 GB"),
        (2.1e12, "2.10 TB"),
        (None, ""),
    ],
)
def test_sizes_carry_their_unit(number, text):
    assert units.size(number) == text


@pytest.mark.parametrize("width", [60, 80, 240])
def test_no_terminal_cuts_a_number(tmp_path, width):
    chosen = rows.table_rows(sweep(tmp_path))
    console = Console(width=width, file=io.StringIO())
    table.print_table(chosen, console)
    printed = console.file.getvalue()
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= width
    for cell in ("10.0 MB", "98.0 %", "0.250 s", "6.00 MB", "3.00", "1.4000", "41.9 MB"):
        assert cell in printed


def test_without_an_accelerator_resident_memory_is_named_as_imports(tmp_path):
    chosen = rows.table_rows(sweep(tmp_path, make=on_cpu))
    first = table.markdown_table(chosen).splitlines()[0]
    assert "Resident (mostly imports)" in first
    assert "Peak allocated" not in first


# ---------------------------------------------------------------- judgements


def test_the_staircase_holds_and_is_compared_with_the_textbook(tmp_path):
    judgement = verdict(sweep(tmp_path), "staircase")
    assert judgement.verdict == "yes"
    assert "zero0 1.250, zero1 1.000, zero2 1.000, zero3 1.000" in judgement.measured


def test_a_staircase_that_rises_is_reported(tmp_path):
    higher = [
        {"params": 2_000_000, "grads": 9_000_000, "optimizer": 6_000_000, "offloaded_host": 0, "offloaded_disk": 0}
    ]
    judgement = verdict(sweep(tmp_path, {"zero2": {"model_state_bytes": higher}}), "staircase")
    assert judgement.verdict == "no"
    assert "zero2 holds more than zero1." in judgement.measured
    assert "zero3 holds more" not in judgement.measured


@pytest.mark.parametrize(("speed", "expected"), [(945.0, "yes"), (900.0, "no")])
def test_speed_of_stages_0_to_2(tmp_path, speed, expected):
    slow = {"all": 2 * speed, "non_padding": speed, "supervised": 1.0}
    judgement = verdict(sweep(tmp_path, {"zero2": {"tokens_per_second": slow}}), "equally fast")
    assert judgement.verdict == expected
    assert units.percent(1 - speed / 990) in judgement.measured


@pytest.mark.parametrize(("speed", "expected", "said"), [(750.0, "yes", "24.2 % slower"), (960.0, "no", "3.0 % slower"),
                                                         (1089.0, "no", "10.0 % faster")])  # fmt: skip
def test_speed_of_stage_3(tmp_path, speed, expected, said):
    changed = {"all": speed, "non_padding": speed, "supervised": speed}
    judgement = verdict(sweep(tmp_path, {"zero3": {"tokens_per_second": changed}}), "stage 3 slower")
    assert (judgement.verdict, said in judgement.measured) == (expected, True)


@pytest.mark.parametrize("word", ["equally fast", "stage 3 slower"])
def test_runs_of_which_no_step_was_timed_give_no_verdict(tmp_path, word):
    untimed = {"tokens_per_second": None, "step_seconds": {"median": None, "p90": None, "warmup_steps_excluded": 2}}
    runs = sweep(tmp_path, dict.fromkeys(SPEED, untimed))
    assert all(run.status == "ok" for run in runs) and "timed" in verdict(runs, word).measured
    assert verdict(runs, word).verdict == "cannot tell"
    assert "zero3" in written(tmp_path)[0]


@pytest.mark.parametrize("word", ["equally fast", "stage 3 slower"])
def test_times_on_a_cpu_give_no_verdict(tmp_path, word):
    judgement = verdict(sweep(tmp_path, make=on_cpu), word)
    assert judgement.verdict == "cannot tell"
    assert "2 CPU processes" in judgement.measured
    assert "little about GPUs" in judgement.measured


def scaled(by, step=4):
    """The losses with one step (from 1) multiplied."""
    return {"loss_history": [loss * (by if index == step else 1) for index, loss in enumerate(LOSSES, start=1)]}


@pytest.mark.parametrize(
    ("precision", "changed", "factor", "expected", "pair"),
    [
        ("fp32", "zero2", 1 + 5e-6, "yes", "ddp and zero2"),
        ("fp32", "zero2", 1 + 5e-5, "no", "ddp and zero2"),
        ("bf16", "ddp", 1.01, "yes", "zero0 and ddp"),
        ("bf16", "ddp", 1.03, "no", "zero0 and ddp"),
        ("bf16", "zero3", 1 + 5e-4, "yes", "zero0 and zero3"),
        ("bf16", "zero3", 1 + 5e-2, "no", "zero0 and zero3"),
    ],
)
def test_losses_are_judged_by_precision(tmp_path, precision, changed, factor, expected, pair):
    changes = {name: {"precision": precision} for name in SPEED}
    changes[changed] |= scaled(factor)
    judgement = verdict(sweep(tmp_path, changes), "train alike")
    assert judgement.verdict == expected
    assert f"at step 4 between {pair} (limit" in judgement.measured


def test_the_precision_of_gradients_stands_beside_the_losses(tmp_path):
    both = {"added_up": "bf16", "reduced": "bf16"}
    changes = {name: {"gradient_dtypes": both} for name in SPEED}
    changes["ddp"] = {"gradient_dtypes": {"added_up": "fp32", "reduced": "fp32"}}
    changes["zero2"] = {"gradient_dtypes": {"added_up": "bf16", "reduced": "fp32"}}
    del changes["zero1"]  # of an earlier version
    judgement = verdict(sweep(tmp_path, changes), "train alike")
    assert judgement.measured.endswith(
        "Gradients: ddp added up and reduced in fp32; zero0, zero3 added up and reduced in bf16; "
        "zero2 added up in bf16 and reduced in fp32."
    )
    in_fp32 = sweep(tmp_path / "fp32", {name: {"precision": "fp32"} for name in SPEED})
    assert "Gradients" not in verdict(in_fp32, "train alike").measured


def test_losses_that_are_equal_say_so(tmp_path):
    judgement = verdict(sweep(tmp_path), "train alike")
    assert (judgement.verdict, judgement.measured.startswith("Equal to the last bit over 6 steps.")) == ("yes", True)


@pytest.mark.parametrize("broken", [math.nan, None, math.inf])
def test_a_loss_that_diverges_is_reported_with_its_step(tmp_path, broken):
    runs = sweep(tmp_path, {"zero1": {"loss_history": [2.0, 1.8, broken, broken]}})
    judgement = verdict(runs, "train alike")
    assert (judgement.verdict, judgement.measured) == ("no", "The loss is not finite: zero1 from step 3.")


def test_losses_of_unequal_length_are_compared_where_both_exist(tmp_path):
    judgement = verdict(sweep(tmp_path, {"zero1": {"loss_history": LOSSES[:3]}}), "train alike")
    assert "Only the first 3 steps are compared" in judgement.measured


def test_communication_is_set_beside_the_paper(tmp_path):
    judgement = verdict(sweep(tmp_path / "real"), "bytes as the paper")
    assert judgement.verdict == "no"
    assert "zero1 3.00Φ (paper 2), zero2 3.00Φ (paper 2), zero3 3.00Φ (paper 3)" in judgement.measured
    assert "zero1: 2Φ (all-reduce of the gradients at the last micro step) + 1Φ (gather" in judgement.measured
    sharded = {"communication_bytes_per_step": {"reduce_scatter": 2_000_000, "all_gather": 2_000_000}}
    assert (
        verdict(sweep(tmp_path / "paper", {"zero1": sharded, "zero2": sharded}), "bytes as the paper").verdict == "yes"
    )


def test_plus_plus_is_set_beside_its_paper_where_it_ran(tmp_path):
    assert not any("ZeRO++" in judgement.question for judgement in judge_runs(sweep(tmp_path / "without")))
    for name, gathered in (("zero3", 4_000_000), ("zero3_hpz", 2_000_000)):
        between = {"all_gather": gathered, "reduce_scatter": 2_000_000}
        save(tmp_path / "with" / name, metrics(name, communication_bytes_between_nodes=between))
    judgement = verdict(read_runs(tmp_path / "with"), "ZeRO++ save")
    assert judgement.verdict == "yes"
    assert judgement.measured == "Into each machine per step: zero3_hpz 2.00Φ (paper 2). zero3 sent 3.00Φ."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"micro_batch_size": 1}, "micro_batch_size (1, 4)"),
        ({"device": "cpu"}, f"device ({GPU}, cpu)"),
        ({"tokens": {"all": 8000, "non_padding": 6000, "supervised": 3000}}, "tokens trained on (8,000, 9,000)"),
    ],
)
def test_rows_under_different_conditions_are_reported(tmp_path, changes, said):
    judgement = verdict(sweep(tmp_path, {"zero3": changes}), "same conditions")
    assert (judgement.verdict, judgement.measured) == ("no", f"The rows differ in {said}. Each was run once.")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([sample()], "yes"),
        ([sample(before=0.5, after=0.1, loss_before=1.0, loss_after=2.0)], "no"),
        ([sample(loss_after=4.0)], "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_answers_are_judged_by_their_mean_scores(tmp_path, samples, expected):
    save(tmp_path / "zero2", metrics("zero2"), samples)
    assert verdict(read_runs(tmp_path), "answers").verdict == expected


def test_the_full_run_is_asked_for_its_answers_and_is_not_compared(tmp_path):
    save(tmp_path / "zero1", metrics("zero1"), [sample(after=0.0)])
    save(tmp_path / "full", metrics("zero2"), [sample(), sample(after=0.7)])
    runs = read_runs(tmp_path)
    assert "full: 2 of 2 answers changed. Mean token_f1 0.100 to 0.600" in verdict(runs, "answers").measured
    assert verdict(runs, "finish").measured == "1 of 1 finished."


def test_an_unfinished_row_is_left_out_of_the_other_judgements(tmp_path):
    save(tmp_path / "zero0", oom("zero0"))
    runs = sweep(tmp_path, strategies=("zero1", "zero2", "zero3"))
    assert verdict(runs, "finish").measured == "3 of 4 finished. zero0: oom."
    assert verdict(runs, "staircase").measured.startswith("Largest rank: zero1 10.0 MB, zero2")
    assert verdict(runs, "stage 3 slower").measured == "zero3 is 23.5 % slower than zero1."


def test_what_a_failed_row_measured_before_it_failed_is_not_judged(tmp_path):
    crawl = {"all": 2.0, "non_padding": 1.0, "supervised": 1.0}
    runs = sweep(tmp_path, {"zero2": {"status": "failed", "error": "killed", "tokens_per_second": crawl}})
    judgement = verdict(runs, "equally fast")
    assert (judgement.verdict, "zero2" in judgement.measured) == ("yes", False)


def test_two_strategies_are_enough_where_the_question_allows(tmp_path):
    runs = sweep(tmp_path, strategies=("ddp", "zero2"))
    assert verdict(runs, "staircase").measured.startswith("Largest rank: ddp 16.0 MB, zero2 9.00 MB.")
    assert verdict(runs, "stage 3 slower").verdict == "cannot tell"


# ---------------------------------------------------------------- files


def pixels(path):
    """Width and height from the header of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def written(folder):
    """The page and what was printed on a terminal of 100 columns."""
    console = Console(width=100, file=io.StringIO())
    return write_report(folder, console).read_text(encoding="utf-8"), console.file.getvalue()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A sweep with a row out of memory, an offloaded one, and a full run beside it."""
    folder = tmp_path_factory.mktemp("report")
    save(folder / "ddp", oom("ddp"))
    save(folder / "zero2_offload", metrics("zero2_offload"))
    evaluations = [{"step": 2, "loss": 1.75}, {"step": 4, "loss": 1.5}]
    many = [sample(prompt=f"prompt number {number} <i>") for number in range(15)]
    save(folder / "full", metrics("zero2", eval_history=evaluations), many)
    sweep(folder, {"zero1": {"loss_history": [2.0, math.nan]}}, strategies=("zero0", "zero1", "zero2", "zero3"))
    page, printed = written(folder)
    return folder, page, printed


def test_tick_labels_are_plain_text(tmp_path, monkeypatch):
    """Names may hold dollar signs, so that mathtext is not read: a log axis would show it as it is written."""
    written_out, labels = plots.Figure.savefig, []

    def listed(figure, *arguments, **keywords):
        written_out(figure, *arguments, **keywords)
        labels.extend(text.get_text() for axes in figure.axes for text in axes.get_yticklabels())

    monkeypatch.setattr(plots.Figure, "savefig", listed)
    losses = {"ddp": {"loss_history": [2.0, 1.0]}, "zero2": {"loss_history": [2.001, 1.01]}}
    plots.draw_comparison(sweep(tmp_path, losses, strategies=("ddp", "zero2")), tmp_path)
    assert "0.001" in labels and not [label for label in labels if "$" in label]


def test_the_pictures_have_their_size(report):
    folder, _, _ = report
    bars = tuple(round(inches * plot_style.DPI) for inches in plots.BARS_INCHES)
    assert pixels(folder / "staircase.png") == pixels(folder / "throughput.png") == bars == (1200, 720)
    assert pixels(folder / "loss.png") == (1200, 900)
    assert pixels(folder / "run_full.png") == (1200, 720)
    assert min(path.stat().st_size for path in folder.glob("*.png")) > 10_000


def test_the_page_fetches_nothing(report):
    _, page, _ = report
    assert re.findall(r'(?:src|href)\s*=\s*"(?!data:image/png;base64,)', page) == []
    assert re.findall(r"<link|<script|<iframe|@import|url\(", page) == []
    assert page.count('src="data:image/png;base64,') == 5


def test_the_page_escapes_what_models_and_people_wrote(report):
    _, page, _ = report
    assert "prompt number 11 &lt;i&gt;" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "CUDA out of memory &lt;sorry&gt;" in page
    assert "<i>" not in page


def test_the_page_shows_twelve_answers_and_the_means_of_all(report):
    _, page, _ = report
    assert "prompt number 12" not in page
    assert "15 prompts; the first 12 are shown" in page
    assert re.search(r"token_f1</td><td class=\"number\">0.100</td><td class=\"number\">0.500", page)


def test_the_page_explains_a_failure(report):
    _, page, printed = report
    for text in (
        "ddp: oom",
        "phase train, rank 1, signal SIGKILL",
        "optimizer states",
        "537 MB",
        "shard &lt;more&gt;",
    ):
        assert text in page
    assert "may help: shard <more>" in printed


def test_the_full_run_has_its_own_section(report):
    folder, page, printed = report
    assert ">Full run<" in page
    assert re.search(r"<td class=\"number\">4</td><td class=\"number\">1.5000</td>", page)
    assert printed.index("Comparison: ") < printed.index("Single runs: ")
    content = json.loads((folder / "report.json").read_text())
    assert [row["label"] for row in content["rows"] if not row["compared"]] == ["full"]


def test_the_judgement_comes_first(report):
    _, page, _ = report
    heads = re.findall(r"<h2>([^<]+)</h2>", page)
    assert heads == ["Judgement", "Comparison", "Runs that did not finish", "Pictures", "Full run", "Before and after",
                     "Details"]  # fmt: skip


def test_the_json_is_strict_and_has_the_numbers_unrounded(report):
    folder, _, _ = report

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    by_name = {row["label"]: row for row in content["rows"]}
    assert content["baseline"] == "zero0"
    assert by_name["zero1"]["final_loss"] is None  # not finite
    assert by_name["zero3"]["relative_speed"] == 750 / 990
    assert [entry["verdict"] for entry in content["judgements"] if "train alike" in entry["question"]] == ["no"]


def test_the_markdown_has_one_line_per_run(report):
    folder, _, _ = report
    lines = (folder / "report.md").read_text().splitlines()
    named = [line.split("|")[1].strip() for line in lines if re.match(r"\| (ddp|zero|full)", line)]
    assert named == ["ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "full"]
    assert len({line.count("|") for line in lines if line.startswith("| zero")}) == 1


def test_a_gpu_page_has_no_warning_about_cpus_and_a_cpu_page_has(report, tmp_path):
    _, gpu_page, _ = report
    assert "measured on a GPU" not in gpu_page
    save(tmp_path / "zero2", on_cpu("zero2"))
    page, printed = written(tmp_path)
    assert "No number on this page was measured on a GPU" in page
    assert "No number on this page was measured on a GPU" in " ".join(printed.split())


def test_one_run_alone_makes_a_page_without_bars(tmp_path):
    save(tmp_path / "mine", metrics("zero2"))
    page, _ = written(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["phases.png", "run_mine.png"]
    assert ">Run mine<" in page
    assert "<h2>Comparison" not in page


def test_only_failures_still_make_a_report(tmp_path):
    save(tmp_path / "zero3", {"schema": 1, "status": "failed", "error": "x", "name": "z", "strategy": "zero3"})
    page, _ = written(tmp_path)
    assert "zero3: failed" in page
    assert pixels(tmp_path / "loss.png") == (1200, 900)


def test_colours_of_strategies_never_meet(tmp_path):
    names = [*SPEED, "zero2_offload", "zero3_offload", "zero3_nvme"]
    for name in names:
        save(tmp_path / name, metrics(name))
    assert len(set(plots.colours(read_runs(tmp_path)))) == len(names)


def test_the_report_loads_no_model_library():
    code = "import sys, zero_recipes.report; print({'torch', 'transformers', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------- useful tokens


def test_mfu_and_useful_tokens_have_their_columns_where_they_are_known(tmp_path):
    sweep(tmp_path / "gpu", {"zero2": {"mfu": 0.4321}, "zero3": {"tokens": None, "status": "failed", "error": "e"}})
    found = {row["strategy"]: row for row in rows.table_rows(read_runs(tmp_path / "gpu"))}
    assert (found["zero2"]["mfu"], found["zero1"]["mfu"]) == (0.4321, None)
    shares = [(row["non_padding_share"], row["supervised_share"]) for row in found.values()]
    assert shares == [pytest.approx((6000 / 9000, 3000 / 9000))] * 4 + [(None, None)]
    shown = table.markdown_table(list(found.values()))
    assert "43.2 %" in shown and "66.7 %" in shown and "33.3 %" in shown
    assert any(note.startswith("MFU") for note in table.notes(list(found.values())))
    sweep(tmp_path / "cpu", make=on_cpu)  # files of before: no mfu
    of_before = rows.table_rows(read_runs(tmp_path / "cpu"))
    assert "MFU" not in table.markdown_table(of_before) and "66.7 %" in table.markdown_table(of_before)
