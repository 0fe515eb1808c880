"""Rehearsals of whole jobs, and of jobs with a fault that neither check nor plan can see."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoConfig, GPT2Config

from tests.helpers.faults import TWO
from tests.helpers.metric_module import write_metric
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, settings_with, write_model, write_recipe, write_rows
from tests.helpers.two_ranks import run_forked
from zero_recipes.checkpoint.save import write_manifest
from zero_recipes.checks.preflight import preflight
from zero_recipes.checks.schedule import CODES
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import launch_key_findings, launched_environment
from zero_recipes.config.read import parse_recipe
from zero_recipes.core.findings import Refusal
from zero_recipes.metrics.failure import not_begun
from zero_recipes.metrics.schema import Failure
from zero_recipes.metrics.scores import Metric
from zero_recipes.tools import main as cli
from zero_recipes.tools import sweep
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.plan.job import known_models
from zero_recipes.tools.rehearse import launches, one_gpu, phases, small

FSDP2 = ROOT / "accelerate_configs" / "fsdp2.yaml"
RESUMING = ("kill", "resume", "resume on half")  # phases
RUNS = ("longest", "equal", "whole", "killed", "resumed", "fewer")
LORA = {"use_peft": True, "lora_target_modules": ["all-linear"]}


def rehearse(recipe: Path, strategy: str, monkeypatch, capsys, first_is_real: bool = True) -> tuple[int, str]:
    """(exit code, the table and what is below it). Without `first_is_real` the tests' server forks that launch too."""
    launched = sweep.run_logged

    def run(words: list[str], folder: Path, *more) -> tuple[int, str]:
        if folder.name == RUNS[0]:
            return run_forked(words, folder, *more)
        return launched(words, folder, *more)

    monkeypatch.chdir(ROOT)
    if not first_is_real:
        monkeypatch.setattr(sweep, "run_logged", run)
    argv = ["rehearse", str(recipe), "--gpus", "2", "--config_file", f"{strategy}.yaml"]
    code = cli.main([*argv, "--output_dir", str(recipe.parent / "rehearsal")])
    return code, capsys.readouterr().out.partition("Phase ")[2]


# whole rehearsals


@pytest.mark.launch
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "strategy, keys",
    [
        ("zero2", {"eval_strategy": "steps", "sample_prompts": 2}),
        grid("zero3", LORA),
        grid("ddp", {"packing": True}),
        grid("zero2", {"dataset_streaming": True}),
        grid("fsdp2", {"gradient_accumulation_steps": 4}),
    ],
)
def test_a_job_without_fault(tmp_path, monkeypatch, capsys, strategy, keys):
    first_is_real = strategy != "zero2"
    code, said = rehearse(write_recipe(tmp_path, **keys), strategy, monkeypatch, capsys, first_is_real)
    assert code == 0 and "failed" not in said, said
    assert "equal bit for bit" in said and "not reached" not in said
    resumed = json.loads((tmp_path / "rehearsal" / "resumed" / "metrics.json").read_text())
    assert resumed["resumed_at"] == [2] and len(resumed["loss_history"]) == 3
    assert json.loads((tmp_path / "rehearsal" / "killed" / "metrics.json").read_text())["status"] == "running"


def unrenderable_row(folder: Path) -> dict:
    """The template refuses the role in row 900."""
    rows = folder / "turns"
    rows.mkdir()
    said = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "Red."}]
    lines = [json.dumps({"messages": said})] * 1000
    lines[900] = json.dumps({"messages": [{"role": "tool", "content": "No."}, *said]})
    (rows / "train.jsonl").write_text("\n".join(lines))
    (folder / "template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    keys = {"dataset_name": str(rows), "chat_template_path": str(folder / "template.jinja"), "dataset_format": None}
    return keys


def evaluation_without_answers(folder: Path) -> dict:
    """Fewer rows than ranks, and max_length leaves nothing of the answer."""
    rows = write_rows(folder / "few")
    row = json.dumps({"instruction": "Say red. " * 200, "input": "", "output": "red"})
    (rows / "test.jsonl").write_text(row + "\n")
    return {"dataset_name": str(rows), "eval_strategy": "steps"}


def own_model(folder: Path, code: str) -> dict:
    """A model with code of its own."""
    model = write_model(folder / "own")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps(config))
    head = "from transformers import GPTNeoXForCausalLM\n\nclass OwnForCausalLM(GPTNeoXForCausalLM):\n"
    (model / "modeling_own.py").write_text(head + code)
    return {"model_name_or_path": str(model), "trust_remote_code": True}


def dies_in_training(folder: Path) -> dict:
    return own_model(folder, in_each_call("if self.calls == 3:\n                raise KeyError('experts')"))


def fails_in_generate(folder: Path) -> dict:
    code = "    def prepare_inputs_for_generation(self, *_, **__):\n        raise KeyError('cache')\n"
    return own_model(folder, code) | {"sample_prompts": ["Say red."]}


def leaves_a_tensor_out(folder: Path) -> dict:
    code = (
        "    def save_pretrained(self, folder, state_dict=None, **more):\n"
        "        state_dict = dict(self.state_dict() if state_dict is None else state_dict)\n"
        "        if 'rehearsal/whole' in str(folder) and 'checkpoint' not in str(folder):\n"
        "            state_dict.pop('gpt_neox.layers.1.mlp.dense_h_to_4h.weight')\n"
        "        super().save_pretrained(folder, state_dict=state_dict, **more)\n"
    )
    return own_model(folder, code)


def counts_its_calls(folder: Path) -> dict:
    """What training depends on is in no checkpoint."""
    return own_model(folder, in_each_call("module.final_layer_norm.bias.data.add_(0.01 * self.calls)"))


def looks_at_its_rank(folder: Path) -> dict:
    """The second rank trains on other weights than the first one, which alone saves."""
    statement = "module.final_layer_norm.weight.data.mul_(1 + int(__import__('os').environ['RANK']))"
    return own_model(folder, in_each_call(statement))


def never_at_its_peak(folder: Path) -> dict:
    return {"warmup_steps": 200, "max_steps": 100}


def packed_into_one_step(folder: Path) -> dict:
    keys = {"packing": True, "max_steps": -1, "num_train_epochs": 1, "global_batch_size": 64, "warmup_steps": 50}
    return keys | {"max_length": 256}


def longer_than_the_positions(folder: Path) -> dict:
    sizes = {"vocab_size": 1031, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = write_model(folder / "gpt2")
    GPT2Config(architectures=["GPT2LMHeadModel"], n_positions=64, **sizes).save_pretrained(model)
    return {"model_name_or_path": str(model)}


def divides_by_the_words_of_an_answer(folder: Path) -> dict:
    metric = write_metric(folder, "dividing", "return {'dividing': 1 / len(predictions[0].split())}")
    return {"sample_metrics": [str(metric)], "sample_prompts": 2, "trust_remote_code": True}


def best_by_a_metric_that_is_missing(folder: Path) -> dict:
    keys = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    return keys | {"load_best_model_at_end": True, "metric_for_best_model": "eval_f1"}


def in_each_call(statement: str) -> str:
    """Code of a model which does this in each forward pass of its training; TRL replaces the model's own forward."""
    return (
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.calls = 0\n"
        "        self.gpt_neox.register_forward_pre_hook(self.count)\n"
        "        self.post_init()\n"
        "    def count(self, module, *_):\n"
        "        if module.training:\n"
        "            self.calls += 1\n"
        f"            {statement}\n"
    )


@pytest.mark.launch
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plant, found_in, words",
    [
        grid(unrenderable_row, "rows", "no tools"),
        grid(evaluation_without_answers, "rows", "ZR513"),
        grid(dies_in_training, "plain torch,training", "experts"),
        grid(looks_at_its_rank, "plain torch", "ZR885"),
        grid(fails_in_generate, "samples", "model_kwargs"),
        grid(leaves_a_tensor_out, "checkpoints, model", "dense_h_to_4h"),
        grid(counts_its_calls, "plain torch,resume", "losses"),
        grid(never_at_its_peak, "schedule", "ZR174"),
        grid(packed_into_one_step, "schedule", "ZR174"),
        grid(longer_than_the_positions, "rows", "ZR175"),
        grid(divides_by_the_words_of_an_answer, "samples", "ZR177"),
        grid(best_by_a_metric_that_is_missing, "evaluation", "ZR871"),
    ],
)
def test_a_planted_fault_is_found(tmp_path, monkeypatch, capsys, plant, found_in, words):
    """`found_in`: the phases that fail, by comma."""
    code, said = rehearse(write_recipe(tmp_path, **plant(tmp_path)), "ddp", monkeypatch, capsys)
    table, _, found = said.partition("rehearsed in")
    failed = [line for line in table.splitlines() if " failed " in line]
    phases_that_fail = found_in.split(",")
    assert code in (1, 2) and len(failed) == len(phases_that_fail), said
    assert all(line.startswith(phase) for line, phase in zip(failed, phases_that_fail, strict=True)), said
    assert words in found


# what is judged, without runs


def test_a_launch_for_plain_torch_that_is_refused_is_left_out(tmp_path, monkeypatch):
    failure = Failure(phase="startup", code="ZR213", reason="bf16 is on in the ds_config")
    refused = left(tmp_path / "equal", status="refused", failure=failure)
    rows = results(ran_well(tmp_path / "all", equal=refused), monkeypatch)
    assert (rows["plain torch"].result, rows["plain torch"].detail) == (
        "left out",
        "ZR213: bf16 is on in the ds_config",
    )
    assert {row.result for name, row in rows.items() if name != "plain torch"} == {"ok"}, "the others go on"


def rehearsal_with(**keys) -> phases.Rehearsal:
    return phases.Rehearsal(Path("r.yaml"), settings_with(**keys), 8, [], ROOT / "zero2.yaml", 2, None)


def left(folder: Path, weights: bytes = b"same", status: str = "ok", **known) -> phases.Ran:
    """What a launch of the folder's name leaves."""
    checkpoint = folder / phases.LAST
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(weights)
    write_manifest(checkpoint, {"step": 3})
    losses = {"loss_history": [2.0, 1.5, 1.25], "grad_norm_history": [1.0] * 3}
    seconds = {"data": 1.0, "model": 2.0, "train": 3.0, "eval": 4.0, "save": 5.0}
    row = not_begun("r", "zero2", phase_seconds=seconds, **(losses | known))
    return phases.Ran(folder, row.model_copy(update={"status": status}), 9.0)


def ran_well(folder: Path, **others: phases.Ran) -> dict[str, phases.Ran]:
    ran = {name: left(folder / name, status="running" if name == "killed" else "ok") for name in RUNS}
    return ran | others


def without_files(monkeypatch) -> None:
    """What a launch leaves beside `left` is as it should be."""
    monkeypatch.setattr(phases, "verify", lambda *_, **__: {"tensors": 3})
    monkeypatch.setitem(phases.JUDGES, "plain torch", lambda *_: "3 steps as plain torch's")


def results(ran: dict[str, phases.Ran], monkeypatch, **keys) -> dict[str, phases.Row]:
    without_files(monkeypatch)
    return {row.phase: row for row in phases.table_of(rehearsal_with(max_steps=100, **keys), ran)}


def test_every_phase_of_launches_that_ran_well_is_ok(tmp_path, monkeypatch):
    rows = results(ran_well(tmp_path), monkeypatch)
    assert {row.result for row in rows.values()} == {"ok"} and len(rows) == 13
    assert rows["rows"].seconds == 1.0 and rows["kill"].seconds == 9.0


@pytest.mark.parametrize(
    "launch, failed_in, status, phase",
    [
        ("longest", "data", "refused", "rows"),
        ("longest", "startup", "refused", "rows"),
        ("longest", "train", "oom", "longest rows"),
        ("whole", "train", "failed", "training"),  # a callback that dies
        ("longest", "eval", "failed", "evaluation"),  # a metric that raises
        ("whole", "eval", "failed", "samples"),
        ("whole", "data", "refused", "samples"),
        ("whole", "save", "failed", "checkpoints, model"),  # a disk that is full at the second checkpoint
        ("killed", "save", "failed", "kill"),
        ("killed", None, "ok", "kill"),  # it was over before it could be killed
    ],
)
def test_a_launch_that_fails_is_a_phase_that_fails(tmp_path, monkeypatch, launch, failed_in, status, phase):
    ran = ran_well(tmp_path)
    names = RUNS[: RUNS.index(launch) + 1]
    failure = Failure(phase=failed_in, code="ZR523" if status == "refused" else None)
    metrics = ran[launch].metrics.model_copy(update={"status": status, "error": "no room", "failure": failure})
    ran = {name: ran[name] for name in names} | {launch: ran[launch]._replace(metrics=metrics)}
    rows = results(ran, monkeypatch)
    row = rows[phase]
    assert row.result == "failed" and row.detail == ("ZR523" if status == "refused" else "ZR865")
    assert row.finding.fix and ("no room" in row.finding.what)
    after = list(rows)[list(rows).index(phase) + 1 :]
    assert {rows[name].result for name in after} == {"not reached"}
    assert {rows[name].result for name in rows if name not in (phase, *after)} <= {"ok"}


@pytest.mark.parametrize(
    "name, change, phase, code",
    [
        ("resumed", {"weights": b"other"}, "resume", "ZR866"),
        ("resumed", {"loss_history": [2.0, 1.5, 1.2500001]}, "resume", "ZR866"),
        ("resumed", {"grad_norm_history": [1.0] * 2}, "resume", "ZR866"),
        ("fewer", {"loss_history": [2.0, 1.5, 1.4]}, "resume on half", "ZR867"),
        ("fewer", {"loss_history": [2.0, 1.5]}, "resume on half", "ZR867"),
    ],
)
def test_a_resumed_run_that_is_another_is_found(tmp_path, monkeypatch, name, change, phase, code):
    rows = results(ran_well(tmp_path / "all", **{name: left(tmp_path / name, **change)}), monkeypatch)
    assert {row.phase: row.detail for row in rows.values() if row.result == "failed"} == {phase: code}


def test_a_strategy_that_cannot_resume_on_fewer_ranks_is_no_fault(tmp_path, monkeypatch):
    refused = left(tmp_path / "fewer", status="refused", failure=Failure(phase="startup", code="ZR712"))
    row = results(ran_well(tmp_path / "all", fewer=refused), monkeypatch)["resume on half"]
    assert (row.result, row.detail) == ("left out", "ZR712")


@pytest.mark.parametrize(
    "keys, about, reasons",
    [
        ({"save_only_model": True}, {}, dict.fromkeys(RESUMING, "save_only_model: nothing resumes")),
        (
            {"sequence_parallel_size": 2},
            {},
            dict.fromkeys(RESUMING, "sequence_parallel_size: nothing resumes (ZR254)"),
        ),
        ({}, {"ranks": 1}, {"resume on half": "one rank has no half"}),
        (
            {},
            {"config_file": FSDP2},
            {"resume on half": "FSDP2 needs two ranks (ZR316)"},
        ),
        ({}, {"config_file": FSDP2, "ranks": 4}, {}),
        ({}, {}, {}),
    ],
)
def test_a_phase_that_is_left_out_says_why(tmp_path, monkeypatch, keys, about, reasons):
    without_files(monkeypatch)
    rehearsal = replace(rehearsal_with(max_steps=100, **keys), **about)
    ran = {name: run for name, run in ran_well(tmp_path).items() if name in rehearsal.launches}
    rows = phases.table_of(rehearsal, ran)
    assert {row.phase: row.detail for row in rows if row.result == "left out"} == reasons
    assert {row.result for row in rows} <= {"ok", "left out"}


def test_a_resume_that_is_refused_says_why(tmp_path, monkeypatch):
    failure = Failure(phase="startup", code="ZR712", reason="a fsdp2 run resumes")
    refused = left(tmp_path / "fewer", status="refused", failure=failure)
    row = results(ran_well(tmp_path / "all", fewer=refused), monkeypatch)["resume on half"]
    assert (row.result, row.detail) == ("left out", "ZR712: a fsdp2 run resumes")


def test_a_refusal_about_a_later_phase_is_shown_there(tmp_path, monkeypatch):
    failure = Failure(phase="startup", code="ZR871", reason="no result of an evaluation")
    ran = {"longest": left(tmp_path / "longest", status="refused", failure=failure, error="no")}
    rows = results(ran, monkeypatch)
    assert (rows["evaluation"].result, rows["evaluation"].detail) == ("failed", "ZR871")
    assert {row.result for name, row in rows.items() if name != "evaluation"} == {"not reached"}


def test_a_metric_that_fails_for_an_answer_is_a_phase_that_fails(tmp_path, monkeypatch):
    """Its run ends well: the answer has no score."""
    ran = ran_well(tmp_path)
    file = ran["whole"].folder / "samples.jsonl"
    row = {"prompt": "?", "scores_before": {}, "scores_after": {"bleu": None}}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"errors": {"bleu": "ZeroDivisionError: zero"}}) + "\n")
    failed = results(ran, monkeypatch)["samples"]
    assert (failed.result, failed.detail) == ("failed", "ZR177")
    assert "bleu" in failed.finding.what and "1 of 2 answers: ZeroDivisionError: zero" in failed.finding.what
    assert results(ran, monkeypatch, ignore=["ZR177"])["samples"].result == "ok"
    file.write_text(json.dumps(row) + "\n")  # none of these was empty
    assert results(ran, monkeypatch)["samples"].result == "ok"
    monkeypatch.setattr(phases, "load_metrics", lambda settings: {"bleu": Metric("bleu", Dividing())})
    failed = results(ran, monkeypatch)["samples"]
    assert failed.result == "failed" and "an empty answer" in failed.finding.what


class Dividing:
    """A metric's module."""

    def compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        return {"bleu": 1 / len(predictions[0])}


@pytest.mark.parametrize(
    "kind, values, code",
    [
        ("linear", {}, None),
        ("cosine", {}, None),
        ("constant_with_warmup", {}, None),
        ("warmup_stable_decay", {"num_decay_steps": 45, "num_stable_steps": 50}, None),
        ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 30}, "ZR868"),
        ("linear", {"warmup_steps": 200}, "ZR174"),
        ("linear", {"warmup_steps": 200, "ignore": ["ZR174"]}, None),
    ],
)
def test_a_schedule_that_ends_early_or_never_begins_is_found(kind, values, code):
    keys = {key: values.pop(key) for key in ("warmup_steps", "ignore") if key in values}
    settings = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": values, "max_steps": 100, "warmup_steps": 5} | keys
    rehearsal = rehearsal_with(**settings)
    if code is None:
        assert "100" in phases.scheduled(rehearsal, {})
    else:
        with pytest.raises(Refusal) as refused:
            phases.scheduled(rehearsal, {})
        assert refused.value.codes == [code]


def test_the_schedule_of_epochs_is_that_of_the_whole_job(tmp_path, monkeypatch):
    """On the real job's ranks, over all rows."""
    monkeypatch.chdir(ROOT)
    keys = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 2, "global_batch_size": 32}
    recipe = write_recipe(tmp_path, dataset_name=str(write_rows(tmp_path / "many", 200)), **keys)
    arguments = parse_arguments(["rehearse", str(recipe), "--gpus", "8", "--rows", "20"])
    rehearsal = launches.read_rehearsal(arguments, tmp_path / "rehearsal", Console(quiet=True))
    assert phases.scheduled(rehearsal, {}) == "ends with step 14"  # 200 rows in steps of 32, twice
    gone = replace(rehearsal, settings=rehearsal.settings.replace(dataset_name=str(tmp_path / "gone")))
    assert phases.scheduled(gone, {}).startswith("not judged: ")


# what is launched


@pytest.mark.parametrize(
    "keys, taken",
    [
        ({}, {"dataset_train_split": "train[:20]", "dataset_test_split": "test[:20]"}),
        ({"dataset_train_split": "train[5:]"}, {"dataset_train_split": "train[5:]", "dataset_test_split": "test[:20]"}),
        ({"dataset_streaming": True}, {}),
        (
            {"datasets": [{"path": "a"}, {"path": "b", "split": "all", "weight": 2}]},
            {"datasets": '[{"path": "a", "split": "train[:20]"}, {"path": "b", "split": "all", "weight": 2}]'},
        ),
    ],
)
def test_the_first_rows_of_each_split_are_taken(keys, taken):
    assert launches.first_rows(settings_with(**keys), 20) == taken


def test_a_recipe_that_names_its_launch_is_rehearsed_on_other_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(tmp_path, num_processes=8, accelerate_config="zero3")
    arguments = parse_arguments(["rehearse", str(recipe), "--gpus", "8"])
    rehearsal = launches.read_rehearsal(arguments, tmp_path / "rehearsal", Console(quiet=True))
    assert (rehearsal.ranks, rehearsal.config_file.name) == (2, "zero3.yaml")
    environment = launched_environment(rehearsal.config_file, rehearsal.ranks)
    named, launched = (recipes.recipe_in_force(path) for path in (recipe, rehearsal.recipe))
    assert [found.code for found in launch_key_findings(recipe, named, environment)] == ["ZR347"]
    assert list(launch_key_findings(rehearsal.recipe, launched, environment)) == []
    assert parse_recipe(recipe, named, []).explicit == parse_recipe(recipe, launched, []).explicit


@pytest.mark.parametrize("length, cut", [(2048, None), (16384, "2048")])
def test_on_cpus_only_the_first_launch_has_long_rows(tmp_path, monkeypatch, length, cut):
    monkeypatch.chdir(ROOT)
    arguments = parse_arguments(["rehearse", str(write_recipe(tmp_path, max_length=length)), "--gpus", "2"])
    rehearsal = launches.read_rehearsal(arguments, tmp_path / "rehearsal", Console(quiet=True))
    lengths = {}
    for name in rehearsal.launches:
        words = launches.command_of(rehearsal, tmp_path / name)
        lengths[name] = words[words.index("--max_length") + 1] if "--max_length" in words else None
    assert lengths == {name: None if name == "longest" else cut for name in RUNS}


@pytest.mark.parametrize(
    ("keys", "ignored"),
    [
        ({"lora_target_modules": ["dense", "no_such"]}, set()),
        ({"lora_target_modules": ["dense"], "peft_config": {"layers_to_transform": [0, 9]}}, {"ZR446"}),
        (
            {"lora_target_modules": [f"layers.{n}.attention.dense" for n in (0, 9)], "ignore": "ZR608"},
            {"ZR446", "ZR608"},
        ),
    ],
)
def test_layers_that_the_small_model_lacks_are_no_misspelt_names(tmp_path, monkeypatch, keys, ignored):
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(tmp_path, use_peft=True, **keys)
    arguments = parse_arguments(["rehearse", str(recipe), "--gpus", "2"])
    rehearsal = launches.read_rehearsal(arguments, tmp_path / "rehearsal", Console(quiet=True))
    words = launches.command_of(rehearsal, tmp_path / "longest")
    (word,) = [word for word in words if word.startswith("--ignore=")]
    assert {*word.removeprefix("--ignore=").split(",")} == {*ignored, *CODES}
    _, findings = preflight(recipe, recipes.recipe_in_force(recipe), rehearsal.words, TWO, starts_now=False)
    (found,) = [finding for finding in findings if finding.code == "ZR446"]
    assert found.level == ("warning" if "ZR446" in ignored else "error")


# the small model


SHAPES = ["google/gemma-3-1b-it", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "mixtral"]
SHAPES += ["openai/gpt-oss-20b", "HuggingFaceTB/SmolLM3-3B", "microsoft/phi-4", "Qwen/Qwen3-30B-A3B"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_model_is_of_the_same_kind(name):
    if name == "mixtral":
        sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
        large = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2} | sizes
    else:
        large = known_models()[name]["config"]
    kind = large["model_type"]
    whole = AutoConfig.for_model(**large)
    few = small.with_fewer_layers(whole, 2)
    assert few.cuts == [f"2 of {whole.num_hidden_layers} layers"]
    cut = next(small.narrower_configs(few, shares=4)).config
    assert cut.num_hidden_layers == 2 and cut.hidden_size < whole.hidden_size / 4
    assert cut.num_attention_heads * whole.num_key_value_heads == whole.num_attention_heads * cut.num_key_value_heads
    assert cut.num_key_value_heads == min(4, whole.num_key_value_heads)
    if kind == "gemma3_text":
        assert cut.layer_types == ["sliding_attention", "full_attention"]
    if kind in ("mixtral", "gpt_oss"):
        assert (cut.num_local_experts, cut.num_experts_per_tok) == (4, 2)
    for key in ("vocab_size", "tie_word_embeddings", "rope_parameters", "sliding_window", "max_position_embeddings"):
        assert getattr(cut, key, None) == getattr(whole, key, None)


def test_a_vision_tower_is_cut_too(tmp_path):
    hub = tmp_path / "hub"
    AutoConfig.for_model(**known_models()["google/gemma-3-4b-it"]["config"]).save_pretrained(hub)
    small.make_small(settings_with(model_name_or_path=str(hub)), tmp_path / "small", None)
    made = AutoConfig.from_pretrained(tmp_path / "small")
    assert (made.text_config.num_hidden_layers, made.vision_config.num_hidden_layers) == (2, 1)


# the machine


@pytest.mark.parametrize(
    "gpus, cards, cores, shares, ranks",
    [
        (8, 0, 2, 1, 2),
        (8, 0, 16, 1, 4),
        (3, 0, 16, 1, 3),
        (1, 0, 16, 1, 1),
        (8, 1, 2, 1, 4),
        (8, 2, 2, 1, 2),
        (6, 0, 16, 4, 4),
    ],
)
def test_as_many_ranks_as_the_machine_takes(gpus, cards, cores, shares, ranks):
    assert launches.ranks_of(gpus, cards, cores, shares) == ranks


def test_what_needs_a_gpu_is_named_and_replaced():
    settings = settings_with(tf32=True, optim="paged_adamw_8bit", attn_implementation="flash_attention_2")
    words, needed = launches.cpu_words(settings)
    assert needed == ["attn_implementation: flash_attention_2", "tf32: True", "optim: paged_adamw_8bit"]
    assert " ".join(words).endswith("--attn_implementation sdpa --tf32 null --optim adamw_torch")
    words, needed = launches.cpu_words(settings_with(fp16=True, bf16=False))
    assert needed == ["fp16: True"] and " ".join(words).endswith("--fp16 false --bf16 true")
    words, needed = launches.cpu_words(settings_with(sequence_parallel_size=2, max_length=32768))
    assert needed == ["max_length: 32768"]
    assert " ".join(words).endswith("--max_length 2048 --pad_to_multiple_of 2048")


class Installed:
    def __init__(self, version: str):
        self.version = version

    def locate_file(self, path: str) -> Path:
        return Path("/site") / path


@pytest.mark.parametrize("version", [None, "2.28.9", "2.30.1"])
def test_an_old_nccl_is_refused(monkeypatch, version):
    monkeypatch.setattr(one_gpu.metadata, "distributions", lambda name: [Installed(version)] if version else [])
    if version == "2.30.1":
        assert one_gpu.nccl_library() == Path("/site/nvidia/nccl/lib/libnccl.so.2")
        return
    with pytest.raises(Refusal, match="ZR869"):
        one_gpu.nccl_library()


# waits for ever as rank 0, and fails as rank 1
STUB = """
echo "$LD_PRELOAD $NCCL_MULTI_RANK_GPU_ENABLE $NCCL_NVLS_ENABLE $*" >"$OUT/$5"
if [ "$5" = 1 ]; then
    until [ -s "$OUT/0" ]; do :; done
    exit 3
fi
exec tail -f /dev/null
"""


def test_ranks_on_one_gpu_are_machines_of_their_own(tmp_path):
    rehearsal = rehearsal_with()
    rehearsal.__dict__["nccl"] = Path("/nccl.so")
    words = launches.command_of(rehearsal, tmp_path / "whole")
    assert words[:4] == ["bash", str(one_gpu.SCRIPT), "/nccl.so", "2"]
    assert "accelerate.commands.launch" in words and "--num_machines" not in words
    stub = tmp_path / "stub.sh"
    stub.write_text(STUB)
    started = ["bash", one_gpu.SCRIPT, "/nccl.so", "2", "1234", "bash", stub, "-m", "run_sft.py"]
    ended = subprocess.run(started, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, timeout=60)
    assert ended.returncode == 3, "the other rank was left, or the exit code was lost"
    for rank in ("0", "1"):
        said = (tmp_path / rank).read_text()
        assert said.startswith("/nccl.so 1 0 -m --num_machines 2 --machine_rank " + rank)
        assert "--main_process_port 1234" in said and said.endswith(" run_sft.py\n")
