"""`zero-recipes plan` through its main: tables, JSON, picture, what is not planned, and its refusals."""

import argparse
import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.helpers.plan_jobs import GB, H100, ROOT, job, recipe, strategies
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import config_files
from zero_recipes.config.read import parse_recipe
from zero_recipes.core.findings import Refusal
from zero_recipes.core.gpus import gpu_named, gpus
from zero_recipes.metrics.schema import ReservedRange
from zero_recipes.tools import main as cli
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.plan import command, shape
from zero_recipes.tools.plan.formulas import predict_by_formulas
from zero_recipes.tools.plan.job import ALL, model_config, read_recipe, read_strategies
from zero_recipes.tools.plan.predict import Predictor
from zero_recipes.tools.plan.simulator import parent as simulation

RECIPE = "recipes/pythia.yaml"


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")


def cli_output(capsys, *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def plan(capsys, *options: str, name: str = RECIPE, gpus: str = "2", gpu: str = "h100-80gb") -> str:
    return cli_output(capsys, "plan", name, "--gpus", gpus, "--gpu", gpu, "--quick", *options)


def document(capsys, *options: str, **where: str) -> dict:
    return json.loads(plan(capsys, "--json", *options, **where))


def rows_of(found: dict) -> dict:
    return {row["job"]["strategy"]: row for row in found["rows"]}


ROW = re.compile(r"^(\S+(?:, Q?LoRA)?)  +(fits|may run out|does not fit)  +([\d,.]+) ", re.MULTILINE)


def test_what_to_do_is_said_first_and_on_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = plan(capsys)
    lines = said.splitlines()
    assert lines[0].startswith("zero3 fits")
    first = " ".join(line.strip() for line in lines[:4])
    assert "pythia-6.9b-deduped on 2 x h100-80gb: 68.2 of 85.5 GB (nvidia-smi up to 85.5), likely " in first
    assert len(lines) <= 24
    command = next(line for line in lines if line.startswith("zero-recipes train "))
    assert command == f"zero-recipes train {RECIPE} --config_file zero3.yaml --num_processes 2"
    assert all(len(line) <= 80 for line in lines if "zero-recipes " not in line)
    assert lines[-1].endswith(" --gpus 2") and "zero-recipes rehearse" in lines[-1]
    rows = {name: (fits, float(needed.replace(",", ""))) for name, fits, needed in ROW.findall(said)}
    assert {row.split(",")[-1].strip() for row in rows} == {*strategies(), "LoRA", "QLoRA"}
    for fits, needed in rows.values():  # the number that decides is the one that is shown
        most = 1.1 * (needed - 1.0)  # by formulas, and without CUDA and NCCL
        assert fits == ("fits" if most <= 77.7 else "may run out" if needed <= 85.5 else "does not fit")
    monkeypatch.setenv("COLUMNS", "240")
    verbose = plan(capsys, "--verbose")
    assert "+17.4 GB" in verbose and verbose.count(" are in the likely range, ") == 1
    assert "zero0: the cheapest change that fits: zero3" in verbose


def test_the_formulas_answer_is_there_while_rows_are_simulated(capsys, monkeypatch):
    """On a terminal each row becomes the engine's, and what is left is said; elsewhere a line says what goes on."""
    seen = []

    def predictor(quick=False, **_):
        def prepare(jobs, progress):
            before = capsys.readouterr()
            progress(jobs[0], 3)
            seen.append((before, capsys.readouterr()))

        return known if quick else SimpleNamespace(prepare=prepare, missing=lambda jobs: {}, known=of_the_engine)

    known = Predictor(quick=True)
    of_the_engine = lambda asked: known(asked).model_copy(update={"reserved_bytes": ReservedRange(low=GB, high=GB)})  # noqa: E731
    by = command.answer_by
    monkeypatch.setattr(command, "Predictor", predictor)
    monkeypatch.setattr(
        command, "answer_by", lambda found, *rest, **more: by(found if callable(found) else known, *rest, **more)
    )
    words = ["plan", RECIPE, "--gpus", "2", "--strategies", "zero3"]
    assert cli.main(words) == 0 and "by formulas: zero3 fits" in seen[0][0].err and not seen[0][0].out
    monkeypatch.setattr(command, "terminal", lambda: Console(force_terminal=True, width=80, height=60))
    assert cli.main(words) == 0 and "the engine's results follow" in seen[1][0].out
    shown = seen[1][1].out
    assert "3 simulations are left" in shown and "1.0 of 85.5 GB" in " ".join(shown.split())


def test_only_what_must_be_simulated_starts_the_engines_process(capsys, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(simulation, "start", started.append)
    monkeypatch.setattr(
        simulation, "simulate", lambda jobs, deadline, ready: [ready(one, predict_by_formulas(one)) for one in jobs]
    )
    monkeypatch.setattr("zero_recipes.tools.plan.predict.FOLDER", tmp_path)
    words = ["plan", RECIPE, "--gpus", "2", "--strategies"]
    assert cli.main([*words, "zero2", "--model_name_or_path", "no/body"]) == 2 and not started  # refused
    assert cli.main([*words, "fsdp2"]) == 0 and not started  # by formulas
    for _ in range(2):
        assert cli.main([*words, "zero2"]) == 0 and started == ["gpu"]  # kept after the first time


def test_a_recipe_and_a_model_s_shape_are_kept_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("zero_recipes.tools.plan.cache.FOLDER", tmp_path)
    (path := tmp_path / "recipe.yaml").write_text((ROOT / RECIPE).read_text())

    def made(*overrides: str) -> tuple:
        shape._shape.cache_clear()
        found = read_recipe(path, overrides)
        return found, vars(shape.shape_of(model_config(found.settings), found.settings))

    ways = ([], ["--use_peft", "true"])
    first = [made(*way) for way in ways]
    with monkeypatch.context() as without:
        for name in ("zero_recipes.tools.plan.job.parse_recipe", "zero_recipes.tools.plan.shape.of_model"):
            without.setattr(name, None)
        assert [made(*way) for way in ways] == first and first[0] != first[1]
    assert first[0][0] == parse_recipe(path, recipes.read_recipe_file(path), [])
    monkeypatch.chdir(tmp_path)
    from_the_package = made("--model_name_or_path", "tiny_world/base")[0].settings.model_name_or_path
    shutil.copytree(ROOT / "tiny_world" / "base", tmp_path / "tiny_world" / "base")
    assert made("--model_name_or_path", "tiny_world/base")[0].settings.model_name_or_path == "tiny_world/base"
    assert from_the_package.endswith("/tiny_world/base")
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    assert made()[0].settings.seed == 7


def test_without_options_a_size_has_the_values_that_trl_gives_a_recipe():
    words = arguments_of("--params", "2e8")
    plain, parsed = (vars(command.requested(words, rest).recipe.settings) for rest in ([], ["--label_names", "a"]))
    differing = {key for key in plain.keys() | parsed if key not in parsed or plain[key] != parsed[key]}
    assert differing == {"label_names"}  # a list, which TRL's parser reads


def arguments_of(*words: str) -> argparse.Namespace:
    found = parse_arguments(["plan", *words, "--gpus", "8"])
    found.strategies = ["zero2"]
    return found


def test_a_model_needs_no_recipe(capsys):
    found = json.loads(cli_output(capsys, "plan", "--params", "7e9", "--gpus", "8", "--quick", "--json"))
    (parameters,) = {row["prediction"]["parameters"] for row in found["rows"]}
    assert parameters == pytest.approx(7e9, rel=0.05) and found["gpu"]["name"] == "h100-80gb"
    sizes = {1e6: "8.39M", 1e7: "9.96M", 4.1e8: "410M", 1e12: "1,002B"}  # the vocabulary alone takes 8.19M
    for size, text in sizes.items():
        assert command.llama(size)[1] == f"a Llama of {text} parameters"
    assert found["recommendation"]["command"].startswith("zero-recipes train RECIPE.yaml ")
    options = ("--params", "1.3e9", "--gpus", "1", "--quick", "--json", "--max_length", "4096", "--use_peft", "true")
    lora = json.loads(cli_output(capsys, "plan", *options))
    assert set(lora["lighter"]) == {"QLoRA"} and lora["recommendation"]["command"].endswith(
        "--use_peft true --dtype bfloat16"
    )
    assert {row["prediction"]["max_length"] for row in lora["rows"]} == {4096}


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("mistral-small-24b", "mistralai/Mistral-Small-24B-Base-2501"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("tiny_world/base", "tiny_world/base"),
    ],
)
def test_a_model_stands_in_a_recipes_place(text, model, monkeypatch):
    monkeypatch.chdir(ROOT)
    request = command.requested(arguments_of(text), [])
    assert request.overrides == ["--model_name_or_path", model]
    assert request.config == model_config(request.recipe.settings)
    (job,) = request.jobs()[0]
    assert request.command(job).endswith(f" --num_processes 8 --model_name_or_path {model}")


def test_a_model_that_no_config_is_known_of_is_refused():
    with pytest.raises(Refusal, match="ZR804"):
        command.requested(arguments_of("qwen3-5b"), [])
    with pytest.raises(Refusal, match="ZR116"):
        command.requested(arguments_of("qwen3-5b.yaml"), [])


def test_a_recipe_of_the_package_is_launched_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    request = command.requested(arguments_of("qwen3-0.6b.yaml"), [])
    assert request.command(request.jobs()[0][0]).startswith("zero-recipes train qwen3-0.6b.yaml ")


def test_the_cheapest_machine_is_taken_where_there_is_a_price(capsys):
    found = document(capsys, "--price", "2.5", gpus="1,2,4,8", gpu="l40s")
    fitting = [row for row in found["rows"] if row["fit"]["status"] != "no" and row["fit"]["margin"] >= 0]
    fitting = [row for row in fitting if row["job"]["strategy"] == found["recommendation"]["strategy"]]
    cheapest = min(fitting, key=lambda row: math.prod(row["cost"]["per_million_tokens"]))
    assert found["smallest_machine"] == 1 and cheapest["job"]["world_size"] > 1
    assert found["recommendation"]["world_size"] == cheapest["job"]["world_size"]


def test_json_is_all_that_is_printed_and_holds_every_figure(capsys):
    found = document(capsys, "--price", "2", "--max", "--max_length", "640")
    rows = rows_of(found)
    assert list(rows) == list(strategies())
    three, asked = rows["zero3"], replace(job("zero3", max_length=640), workspace=H100.workspace_bytes)
    formulas = predict_by_formulas(asked).model_dump()
    assert three["prediction"] == formulas
    assert three["fit"]["status"] == "fits" and three["change"] is None and three["limits"]["micro_batch_size"] >= 2
    changed = rows["zero0"]["change"]["job"]
    assert changed["strategy"] == "zero3" and "--num_processes 2" in changed["command"]
    hours, run = three["cost"]["hours"], three["cost"]["run"]
    assert run == pytest.approx([2 * 2 * end for end in hours])  # two GPUs at 2 an hour
    assert hours == pytest.approx([500 * end / 3600 for end in three["speed"]["step_seconds"]])  # max_steps: 500
    assert found["recommendation"]["command"].endswith(" --max_length 640")


def test_epochs_of_data_at_hand_are_counted_in_steps(capsys):
    rows = len((ROOT / "tiny_world" / "train.jsonl").read_text().splitlines())
    keys = ["--max_steps", "-1", "--num_train_epochs", "3", "--per_device_train_batch_size", "7"]
    options = [*keys, "--global_batch_size", "28", "--strategies", "zero2", "--price", "1"]
    (row,) = document(capsys, *options, name="recipes/tiny.yaml")["rows"]
    steps = 3 * math.ceil(math.ceil(math.ceil(rows / 7) / 2) / 2)  # micro batches, two ranks, two micro steps
    assert row["cost"]["hours"] == pytest.approx([steps * end / 3600 for end in row["speed"]["step_seconds"]])


def test_the_smallest_machine_is_looked_for(capsys):
    said = plan(capsys, gpus="1,2,4,8", gpu="l40s")
    cheapest = "zero2 fits EleutherAI/pythia-6.9b-deduped on 8 x l40s-48gb, the cheapest a token of 1, 2, 4, 8 GPUs: "
    assert said.startswith(cheapest) and "tokens/s, " in said
    assert all(row in said for row in ("\n1 x zero2_offload  fits", "\n4 x zero3          may run out"))
    found = document(capsys, "--strategies", "zero2,zero3", gpus="1,2,4,8", gpu="l40s")
    words = {(row["job"]["world_size"], row["job"]["strategy"]): row["fit"]["status"] for row in found["rows"]}
    assert words[2, "zero3"] == "no" and words[4, "zero3"] == "tight" and found["smallest_machine"] == 4
    assert "--num_processes 8" in found["recommendation"]["command"]
    tiny = document(capsys, name="recipes/tiny.yaml", gpus="1,2,4", gpu="l40s")
    assert set(tiny["not_planned"]["4"]) == set(strategies())  # global_batch_size 16: not by 4 processes
    batches = "--per_device_train_batch_size 16"  # accumulation follows from global_batch_size
    assert tiny["recommendation"]["command"] == f"zero-recipes train recipes/tiny.yaml --num_processes 1 {batches}"
    assert tiny["better"]["job"] == tiny["recommendation"]
    said = plan(capsys, "-v", "--price", "0.01", name="recipes/tiny.yaml")
    assert "it is the lowest with room of " in said and "price of the run <0.001." in said
    none = document(capsys, "--strategies", "zero3", gpus="1,2", gpu="l40s")
    last = none["rows"][-1]
    assert none["smallest_machine"] is None and last["change"]["job"] == none["recommendation"]
    assert last["job"]["world_size"] == 2 and "--use_peft true" in none["recommendation"]["command"]


def test_memory_and_nvme_of_the_machine(capsys):
    options = ("--strategies", "zero2_offload")
    (row,) = document(capsys, *options, "--host_memory", "64")["rows"]
    assert row["fit"]["status"] == "no"
    assert row["fit"]["host_lacks"] == row["prediction"]["host_bytes"]["training"] - 64 * GB
    assert document(capsys, *options, "--host_memory", "160")["rows"][0]["fit"]["status"] == "fits"
    said = plan(capsys, "--strategies", "zero2", "--host_memory", "60", "-v", gpu="h200")
    assert "zero2: the run fits but cannot resume" in said
    swaps = ("--strategies", "zero3,zero3_infinity,zero3_offload_infinity", "--nvme", "50")
    said = plan(capsys, *swaps, "-v", gpus="16")
    first, second = ([line for line in said.splitlines() if line.startswith(f"{name} ")]
                     for name in ("zero3_offload_infinity", "zero3_infinity"))  # fmt: skip
    assert "6.86 GB" in first[1] and " fits " in first[0] and "NVMe too small" in second[0]


def test_a_network_of_the_command_line_counts_and_machines_are_launched_as_such(capsys):
    def found(*options: str) -> tuple[float, float]:
        answer = document(capsys, "--strategies", "zero3", *options, gpus="16")
        command = answer["recommendation"]["command"]
        assert "--num_processes 16 --hosts HOST,HOST --machine_rank K" in command
        return answer["rows"][0]["speed"]["step_seconds"]

    fast, slow = found("--network", "50"), found("--network", "5")
    assert slow[0] > 3 * fast[0] and slow[1] > 3 * fast[1] and found() == fast  # the hardware table's


@pytest.mark.parametrize(
    ("options", "strategy", "reasons"),
    [
        ("--gpus 2 --gpu h100-80gb --host_memory 512 --nvme 4000", "zero3", {"zero2_autocast": "ZR2031"}),
        ("--gpus 2 --gpu a100-40gb --host_memory 64 --nvme 4000", "zero3_infinity",
         {"zero3_hpz": "ZR224", "zero3_plus_plus": "ZR226", "zero3_qgz": "ZR226"}),
        ("--gpus 2 --gpu a100-40gb --host_memory 64", None,
         {"zero3_infinity": "--nvme", "zero3_offload_infinity": "--nvme"}),
    ],
)  # fmt: skip
def test_all_strategies_are_planned_or_named_with_the_reason(capsys, options, strategy, reasons):
    assert cli.main(["plan", RECIPE, "--quick", "--json", "--strategies", "all", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    if strategy is None:
        assert all(row["fit"]["status"] != "fits" for row in found["rows"])
    else:
        assert found["recommendation"]["strategy"] == strategy
        assert ("--nvme_path FOLDER" in found["recommendation"]["command"]) == (strategy == "zero3_infinity")
    names = {row["job"]["strategy"] for row in found["rows"]}
    (not_planned,) = found["not_planned"].values()
    assert names | set(not_planned) == set(ALL) == set(config_files()) - {"multi_node"}
    assert not names & set(not_planned)
    assert all(part in not_planned[name] for name, part in reasons.items())


@pytest.mark.parametrize(("name", "ways"), [("qwen3-4b", {"LoRA", "QLoRA"}), ("qwen3-30b-a3b", {"LoRA"})])
def test_four_bits_are_not_shown_where_they_would_be_refused(capsys, name, ways):
    """bitsandbytes packs no experts: `check` refuses it (ZR481)."""
    argv = ["plan", name, "--gpus", "2", "--gpu", "h200", "--quick", "--json", "--lora_target_modules", "q_proj"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["lighter"].keys() == ways


@pytest.mark.parametrize(
    ("options", "code", "name"),
    [
        ("--gpu abacus", "ZR807", RECIPE),
        ("--gpus 2,x", "ZR805", RECIPE),
        ("--gpus ²", "ZR805", RECIPE),  # a digit that int() does not read
        ("--gpus 12", "ZR805", RECIPE),
        ("--strategies zero5", "ZR304", RECIPE),
        ("--strategies zero3_plus_plus,zero3_hpz", "ZR842", RECIPE),
        ("--strategies zero3 --deepspeed ds_configs/zero2.json", "ZR801", RECIPE),
        ("--max_stepz 5", "ZR103", RECIPE),
        ("--model_name_or_path no/body", "ZR804", RECIPE),
        ("--hardware none.yaml", "ZR199", RECIPE),
        ("--gpu t4", "ZR273", RECIPE),
        ("--gpus 3", "ZR842", "recipes/tiny.yaml"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, options, code, name):
    assert cli.main(["plan", name, "--gpus", "2", "--gpu", "h200", "--quick", *options.split()]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_a_model_comes_from_the_project_a_folder_or_the_cache_and_else_is_refused(tmp_path, monkeypatch):
    settings = recipe("pythia").settings
    assert model_config(settings)["num_hidden_layers"] == 32
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert model_config(settings.replace(model_name_or_path=str(tmp_path))) == {"model_type": "llama"}
    for bad in ({"model_revision": "step1000"}, {"model_name_or_path": "./no/folder"}, {"model_name_or_path": None}):
        with pytest.raises(Refusal, match="ZR804") as refusal:
            model_config(settings.replace(**bad))
        assert "hf download" in refusal.value.fix
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: str(tmp_path / "config.json"))
    assert model_config(settings.replace(model_name_or_path="nobody/nothing")) == {"model_type": "llama"}


def test_strategies_are_files_or_the_recipes_own(capsys):
    assert list(read_strategies(recipe("pythia"), None)) == list(strategies())
    assert read_strategies(recipe("pythia", "--fsdp", "true"), None) == {"fsdp2": None}
    assert list(rows_of(document(capsys, "--strategies", "single", "--gpus", "1"))) == ["single"]
    found = document(capsys, "--deepspeed", "ds_configs/zero2_offload.json")
    assert list(rows_of(found)) == ["zero2_offload"]
    assert found["recommendation"]["command"].startswith("zero-recipes train")


# hardware

MINE = """
v100-32gb: {memory_mib: 32768, bf16_tflops: 100, memory_gb_s: 900, link_gb_s: 150, host_gb_s: 16, network_gb_s: 12.5,
            source: mine}
"""


def test_a_gpu_is_named_by_its_beginning_and_a_faulty_file_is_refused(tmp_path):
    known = gpus()
    assert gpu_named("H200", known).name == "h200-141gb" and gpu_named("4090", known).name == "rtx4090-24gb"
    with pytest.raises(Refusal, match=r"a100-40gb and a100-80gb .*ZR807"):
        gpu_named("a100", known)
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINE + MINE.replace("v100-32gb", "h100-80gb"))
    with_mine = gpus(mine)
    assert with_mine["v100-32gb"].memory_bytes == 32 * 2**30 and with_mine["h100-80gb"].bf16_tflops == 100
    assert "a100-80gb" in with_mine and gpus()["h100-80gb"].bf16_tflops == 989
    for old, new in (("32768", "0"), ("bf16_tflops", "achievable"), ("mine", "mine, price: 2"), (MINE, "v100: [")):
        mine.write_text(MINE.replace(old, new))
        with pytest.raises(Refusal, match="ZR199"):
            gpus(mine)
