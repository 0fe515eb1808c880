"""What a launcher gives a run, and what a run makes of it: strategies, processes, GPUs, build locks."""

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import numpy
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from deepspeed.accelerator import real_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from rich.console import Console
from torch.utils.file_baton import FileBaton

from tests.helpers.faults import ROOT, Side
from tests.helpers.tiny import write_recipe, write_rows
from tests.helpers.tools import refusal_of
from tests.helpers.two_ranks import environment_of_launch
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import launch_key_findings, launched_environment
from zero_recipes.config.command_line import split_command_line
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.run import refuse_uneven_gpus
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core import tables
from zero_recipes.core.findings import Refusal
from zero_recipes.core.host import Host
from zero_recipes.core.process import PhaseClock
from zero_recipes.core.run_end import print_ending
from zero_recipes.engine import group
from zero_recipes.engine.group import start_process_group
from zero_recipes.engine.kernels import build, is_compiled, remove_stale_locks
from zero_recipes.engine.warnings import quieten_loggers
from zero_recipes.model.meta import size_of
from zero_recipes.tools import main as cli
from zero_recipes.tools.plan.job import read_strategies
from zero_recipes.training import inputs

LINKS = ("ddp.yaml", "zero1.yaml", "zero2.yaml", "zero3.yaml")


@pytest.fixture
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")))
def test_a_file_launches_its_strategy(root, name):
    """accelerate's own parser and launch make the environment that a run reads."""
    environment = environment_of_launch(Path("accelerate_configs") / name, None)
    if name in LINKS:
        assert environment == environment_of_launch(Path(name), None)
    recipe = parse_recipe(Path("recipes/pythia.yaml"), {}, [])
    count = load_config_from_file(f"accelerate_configs/{name}").num_processes
    found = resolve_strategy(recipe.settings, environment | {"WORLD_SIZE": str(count)}, size_of)
    assert found.name == {"multi_node.yaml": "zero3"}.get(name, Path(name).stem)


def test_check_takes_the_file_of_a_launch_and_plan_and_sweep_its_name(root, monkeypatch, capsys, tmp_path):
    out = ["--output_dir", str(tmp_path / "out")]
    assert cli.main(["check", "recipes/tiny.yaml", "--config_file", "zero3.yaml", *out]) == 0
    assert "zero3 (DeepSpeed, ds_configs/zero3.json)" in capsys.readouterr().out
    plan = ["plan", "recipes/tiny.yaml", "--gpus", "2", "--gpu", "h200", "--quick", "--json"]
    assert cli.main([*plan, "--strategies", "zero3"]) == 0
    assert [row["job"]["strategy"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["zero3"]
    swept = []
    monkeypatch.setattr("zero_recipes.tools.sweep.sweep", lambda recipe, names, *_, **__: swept.append(names) or {})
    for words in (["--strategies", "zero3_offload,ddp"], []):
        assert cli.main(["sweep", "recipes/tiny.yaml", *words]) == 0
    assert swept == [["zero3_offload", "ddp"], ["ddp", "zero0", "zero1", "zero2", "zero3"]]


def test_what_accelerates_launcher_refuses_is_one_message(root, monkeypatch, capsys, tmp_path):
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: []\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["train", "recipes/tiny.yaml", "--config_file", str(tmp_path / "ddp.yaml")]) == 2
    assert "while launching with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "gpus", "words", "started", "is_said"),
    [
        ("num_processes: 2", 0, [], 1, True),
        ("num_processes: 1", 8, [], 8, True),
        ("num_processes: 8", 8, [], 8, False),
        ("num_processes: -1", 8, [], 8, False),
        ("", 8, [], 8, False),
        ("num_processes: 2", 8, ["--num_processes", "4"], 4, False),
    ],
)
def test_train_says_where_it_starts_other_processes_than_the_named_file_has(
    root, monkeypatch, capsys, tmp_path, text, gpus, words, started, is_said
):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "mine.yaml").write_text(f"distributed_type: MULTI_GPU\n{text}\n")
    recipe = write_recipe(tmp_path, use_cpu=gpus == 0)
    assert cli.main(["train", str(recipe), "--config_file", str(tmp_path / "mine.yaml"), *words]) == 0
    assert cli.main(["train", str(recipe), *words]) == 0
    assert [one.num_processes for one in launched] == [started] * 2
    said = capsys.readouterr().out
    assert said.count("add --num_processes") == (1 if is_said else 0), said


@pytest.mark.parametrize(
    "text", ["distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n", "distributed_type: FSDP\n"]
)
def test_a_strategy_of_ones_own_without_a_ds_config_is_not_planned_as_ddp(tmp_path, monkeypatch, text):
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe(ROOT / "recipes" / "pythia.yaml", {}, [])
    Path("accelerate_configs/mine.yaml").write_text(text)
    assert refusal_of(read_strategies, recipe, ["ddp", "mine"]).codes == ["ZR367"]
    assert read_strategies(recipe, ["ddp", "fsdp2"]) == {"ddp": None, "fsdp2": None}


@pytest.mark.parametrize(
    ("launched", "overrides", "code"),
    [
        ("zero2.yaml", [], None),
        ("zero3.yaml", [], "ZR201"),
        ("zero3.yaml", ["--deepspeed", "null"], None),
        ("fsdp2.yaml", [], "ZR311"),
        ("fsdp2.yaml", ["--deepspeed", "null"], None),
        ("ddp.yaml", [], None),
    ],
)
def test_a_recipe_with_a_ds_config_under_accelerate(root, launched, overrides, code):
    """The same ds_config is taken, another refused; where the launch has none, the recipe's counts."""
    path = Path("recipes/pythia-zero2.yaml")
    environment = environment_of_launch(Path("accelerate_configs", launched), None) | {"WORLD_SIZE": "2"}
    run, findings = preflight(path, recipes.read_recipe_file(path), overrides, environment, starts_now=False)
    assert [found.code for found in findings if found.code in ("ZR201", "ZR311")] == ([code] if code else [])
    if code is None:
        assert run.strategy.name == (Path(launched).stem if overrides else "zero2")


@pytest.mark.parametrize(
    ("strategies", "words", "refused"),
    [
        ("ddp", [], True),
        ("zero2,zero3", [], True),
        ("zero2", [], True),
        ("ddp,zero3", ["--deepspeed", "null"], False),
        ("zero3", ["--deepspeed", "ds_configs/zero3.json"], True),
    ],
    ids=str,
)
def test_a_sweep_of_a_recipe_with_a_ds_config_is_refused(
    root, tmp_path, monkeypatch, capsys, strategies, words, refused
):
    """Under ddp.yaml it would train at stage 2, in a row that is called ddp."""
    launched = []
    monkeypatch.setattr("zero_recipes.tools.sweep.run_logged", lambda *words: launched.append(words) or (1, ""))
    sweep = ["sweep", "recipes/pythia-zero2.yaml", "--strategies", strategies, "--output_dir", str(tmp_path / "out")]
    assert cli.main([*sweep, *words]) == (2 if refused else 1)
    assert ("ZR861" in capsys.readouterr().err) == refused and bool(launched) != refused


FSDP1 = {
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
}


def of_fsdp1(tmp_path, **changes) -> dict:
    """The `fsdp_config` in force under such a file, where there is no GPU."""
    file = tmp_path / "fsdp1.yaml"
    text = json.dumps({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": FSDP1 | changes})
    file.write_text(text)
    settings = parse_recipe(ROOT / "recipes" / "pythia.yaml", {}, []).settings
    with mock.patch("torch.cuda.is_available", return_value=False):
        strategy = resolve_strategy(settings, launched_environment(file, None), size_of)
    assert strategy.name == "fsdp2" and strategy.fsdp_config["version"] == 2
    assert strategy.fsdp_config["state_dict_type"] == "FULL_STATE_DICT"
    return strategy.fsdp_config


RESHARDING = ("FULL_SHARD", "HYBRID_SHARD", "full_shard", 1, "1", 4)
KEEPING = ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2", "shard_grad_op", 2, "3", 5)


@pytest.mark.parametrize("strategy", [*RESHARDING, *KEEPING])
def test_an_fsdp1_strategy_becomes_one_of_fsdp2(tmp_path, strategy):
    """Files of old versions of accelerate have numbers; accelerate takes small letters, too."""
    assert of_fsdp1(tmp_path, fsdp_sharding_strategy=strategy)["reshard_after_forward"] is (strategy in RESHARDING)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"auto_wrap_policy": "NO_WRAP"}),
        ({"fsdp_auto_wrap_policy": None}, {"auto_wrap_policy": "NO_WRAP"}),
        ({"fsdp_auto_wrap_policy": "transformer_based_wrap"}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000},
        ),
        ({"fsdp_transformer_layer_cls_to_wrap": "A,B"}, {"transformer_layer_cls_to_wrap": "A,B"}),
        ({"fsdp_backward_prefetch": "NO_PREFETCH"}, {}),
        ({"fsdp_backward_prefetch": 2, "fsdp_forward_prefetch": True}, {}),
        ({"fsdp_backward_prefetch": None, "fsdp_use_orig_params": False}, {}),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, {}),
        ({"fsdp_state_dict_type": 1}, {}),
        ({"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}, {}),
        ({"fsdp_offload_params": True}, {"cpu_offload": True}),
        ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing": True}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": True}),  # accelerate reads none
    ],
    ids=str,
)
def test_an_fsdp1_file_is_read_as_fsdp2_without_a_gpu(tmp_path, changes, expected):
    """accelerate's own FSDP1 plugin asks for one, to synchronize the ranks' weights."""
    config = of_fsdp1(tmp_path, **changes)
    assert config | expected == config


@pytest.mark.parametrize(
    "key", ["fsdp_sharding_strategy", "fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_state_dict_type"]
)
def test_a_word_that_accelerate_does_not_know_is_named_with_its_key(tmp_path, key):
    """accelerate itself says `KeyError: 'AUTO'`."""
    refused = refusal_of(of_fsdp1, tmp_path, **{key: "AUTO"})
    assert refused.codes == ["ZR368"] and f"{key}: AUTO" in str(refused)


def test_a_stale_build_lock_is_removed_and_one_that_is_held_stays(tmp_path, monkeypatch, capsys):
    """A stale lock hangs every later launch silently; who made one holds the file open (torch/utils/file_baton.py)."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("stale", "held"):
        (tmp_path / name).mkdir()
    (tmp_path / "stale" / "lock").write_text("")
    baton = FileBaton(str(tmp_path / "held" / "lock"))
    assert baton.try_acquire()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        remove_stale_locks()
        assert (tmp_path / "stale" / "lock").exists(), "another user may be compiling"
    remove_stale_locks()
    assert not (tmp_path / "stale" / "lock").exists() and "stale" in capsys.readouterr().out
    assert (tmp_path / "held" / "lock").exists()
    monkeypatch.setitem(ALL_OPS, "held", SimpleNamespace(load=lambda verbose: baton.release()))
    build(["held"])
    assert f"waiting for process {os.getpid()}" in capsys.readouterr().err


def test_a_kernel_of_another_installation_or_of_a_killed_compiler_is_compiled_anew(tmp_path, monkeypatch):
    """ninja would compile it where it is loaded: minutes without a line, longer than the other ranks wait."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    rules, library = tmp_path / "cpu_adam" / "build.ninja", tmp_path / "cpu_adam" / "cpu_adam.so"
    rules.parent.mkdir()
    library.write_text("")
    for sources, built_after, compiled in (
        (Path(deepspeed.__file__).parent, 1, True),
        (Path(deepspeed.__file__).parent, -1, False),
        (f"/elsewhere{Path(deepspeed.__file__).parent}", 1, False),
    ):
        rules.write_text(f"build cpu_adam.o: compile {sources}/ops/csrc/adam/cpu_adam.cpp\n")
        os.utime(library, (time := rules.stat().st_mtime + built_after, time))
        assert is_compiled("cpu_adam", Host()) == compiled
    rules.unlink()
    assert not is_compiled("cpu_adam", Host())


@pytest.mark.parametrize(
    ("strategy", "device", "environment", "said"),
    [
        (("zero2", 4), "cuda", {}, r"4 processes .* 2 GPUs .ZR309"),
        (("zero2", 4), "cuda", {"LOCAL_WORLD_SIZE": "2"}, None),  # two machines
        (("zero2", 4), "cuda", {"LOCAL_SIZE": "2"}, None),  # by the deepspeed launcher, which sets no LOCAL_WORLD_SIZE
        (("zero2", 4), "cpu", {}, None),
        (("single", 1), "cuda", {}, r"2 GPUs .*ZR308"),
        (("single", 1), "cuda", {"RANK": "0", "LOCAL_RANK": "0"}, r"2 GPUs .*ZR308"),  # torchrun --nproc_per_node 1
        (("zero2", 1, DsConfig({})), "cuda", {"RANK": "0"}, None),
        (("zero2", 1, DsConfig({})), "cuda", {}, r"2 GPUs .*ZR308"),  # plain python
    ],
)
def test_processes_and_gpus_fit(monkeypatch, strategy, device, environment, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(Refusal, match=said) if said else contextlib.nullcontext():
        refuse_uneven_gpus(Strategy(*strategy), device, environment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_refused_rank_waits_in_nccl_for_no_other(monkeypatch, device):
    ended = []
    for name in ("ops_of", "start_process_group", "set_host_threads"):
        monkeypatch.setattr(group, name, lambda *_: None)
    monkeypatch.setattr(group.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(group.distributed, "destroy_process_group", lambda: ended.append(device))
    settings = SimpleNamespace(ddp_timeout=60)
    with pytest.raises(Refusal), group.process_group(SimpleNamespace(strategy=None, device=device, settings=settings)):
        raise Refusal([])
    assert ended == ["cpu"] * (device == "cpu")


def test_an_error_that_nobody_expected_ends_with_its_traceback_and_in_the_launchers_table(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        raise ValueError("odd")
    except ValueError as error:
        assert print_ending(error) == 1
    assert capsys.readouterr().err.startswith("Traceback")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: odd"


def test_check_takes_the_launch_of_the_recipe(tmp_path, monkeypatch, capsys):
    text = (ROOT / "accelerate_configs" / "zero2.yaml").read_text()
    text = text.replace("deepspeed_config:\n", "deepspeed_config:\n  zero_stge: 3\n")
    Side(recipe="num_processes: 2\naccelerate_config: zero2.yaml", files={"zero2.yaml": text}).write(tmp_path)
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "zero2" in shown and "world size    2" in shown and "has zero_stge, which" in shown
    assert cli.main(["check", "recipe.yaml", "--config_file", "zero2.yaml"]) == 0
    assert capsys.readouterr().out.count("has zero_stge, which") == 1
    for environment in (launched_environment(Path("zero2.yaml"), 3), launched_environment(None, 2)):
        _, findings = preflight(Path("recipe.yaml"), recipes.read_recipe_file(Path("recipe.yaml")), [], environment)
        assert [finding.code for finding in findings if finding.level == "error"] == ["ZR347"]


@pytest.mark.parametrize("named", ["zero2", "zero3", "ddp", "fsdp2"])
def test_a_recipe_that_names_its_launch_is_refused_under_any_other(root, named):
    """Each of the others shards in its own way, by what the launcher puts into the environment."""
    mapping = {"accelerate_config": f"{named}.yaml", "num_processes": 2}
    for launched in ("zero2", "zero3", "ddp", "fsdp2"):
        environment = launched_environment(Path("accelerate_configs") / f"{launched}.yaml", 2)
        codes = [found.code for found in launch_key_findings(Path("recipe.yaml"), mapping, environment)]
        assert codes == ([] if launched == named else ["ZR347"]), launched
    three = launched_environment(Path("accelerate_configs") / f"{named}.yaml", 3)
    assert [found.code for found in launch_key_findings(Path("recipe.yaml"), mapping, three)] == ["ZR347"]
    without_number = {"accelerate_config": f"{named}.yaml"}
    assert list(launch_key_findings(Path("recipe.yaml"), without_number, three)) == []


@pytest.mark.parametrize(("launched", "codes"), [("ddp.yaml", ["ZR347"]), (None, [])])
def test_deepspeed_without_a_file_of_its_own_is_told_from_ddp(root, tmp_path, launched, codes):
    """Neither launch then names a ds_config."""
    inline = tmp_path / "inline.yaml"
    inline.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n")
    environment = launched_environment(Path("accelerate_configs") / launched if launched else inline, 2)
    mapping = {"accelerate_config": str(inline), "num_processes": 2}
    assert [found.code for found in launch_key_findings(Path("recipe.yaml"), mapping, environment)] == codes


@pytest.mark.parametrize(
    ("words", "environment", "rank"),
    [
        (["--local_rank=3"], {}, "3"),
        (["--local-rank", "3"], {}, "3"),
        (["--local_rank", "3"], {"LOCAL_RANK": "1"}, "1"),
    ],
)
def test_the_deepspeed_launchers_local_rank_goes_to_the_environment(words, environment, rank):
    """It passes one to each process; the launcher's own environment counts more."""
    with mock.patch.dict("os.environ", environment, clear=True) as left:
        argv = [*words, "r.yaml", "--traceback", "--max_steps", "2"]
        assert split_command_line(argv) == (Path("r.yaml"), ["--max_steps", "2"])
        assert left["LOCAL_RANK"] == rank


def test_without_a_login_to_wandb_no_weight_is_loaded(monkeypatch):
    def login():
        raise ValueError("No API key")

    run = SimpleNamespace(settings=SimpleNamespace(push_to_hub=False))
    arguments = SimpleNamespace(report_to=["wandb"])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login))
    monkeypatch.setenv("WANDB_MODE", "offline")
    inputs._log_in(run, arguments)
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(Refusal, match=r"No API key[\s\S]*WANDB_MODE: offline") as refused:
        inputs._log_in(run, arguments)
    assert refused.value.codes == ["ZR912"]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda: False))
    with pytest.raises(Refusal, match="ZR912"):
        inputs._log_in(run, arguments)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda: True))
    inputs._log_in(run, arguments)


def test_each_process_takes_its_gpu_fsdp_reduces_on_the_host_too_and_one_process_is_alone(monkeypatch):
    taken, met = [], []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("zero_recipes.engine.group.rendezvous", lambda backend, *_: met.append(backend))
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "PATH": os.environ["PATH"]}.items():
        monkeypatch.setenv(name, value)
    for strategy in (Strategy("ddp", 4), Strategy("fsdp2", 4, fsdp_config={"cpu_offload": False})):
        start_process_group(strategy, "cuda", 60, set())
    assert (taken, met) == ([1, 1], ["nccl", "cuda:nccl,cpu:gloo"])
    start_process_group(Strategy("single", 1, None, None), "cpu", 60, set())
    assert "LOCAL_RANK" not in os.environ and len(met) == 2


def test_a_phase_inside_another_is_taken_out_of_it_and_a_failure_names_the_innermost(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock(before=3.5)
    with clock.phase("train"):
        now[0] += 2
        with clock.phase("eval"):
            now[0] += 5
        now[0] += 1
    now[0] += 0.25
    clock.book()
    assert clock.seconds == {"startup": 3.75, "data": 0, "model": 0, "train": 3, "eval": 5, "save": 0}
    with pytest.raises(ValueError), clock.phase("train"), clock.phase("save"):
        raise ValueError
    assert clock.failed == "save"


def test_what_goes_on_is_printed_at_once_and_again_until_it_ends(monkeypatch):
    console, started, ends = Console(file=io.StringIO(), width=80), [], iter([False, True])
    event = SimpleNamespace(wait=lambda seconds: next(ends), set=lambda: started.append("ended"))
    thread = lambda target, daemon: SimpleNamespace(start=lambda: started.append(target))  # noqa: E731
    monkeypatch.setattr(tables, "threading", SimpleNamespace(Event=lambda: event, Thread=thread))
    with tables.working("reading", console) as say:
        say("planning")
        started[0]()
    assert re.fullmatch(r"reading\nplanning: \d+ s\n", console.file.getvalue()) and started[1:] == ["ended"]


def test_the_checks_leave_random_numbers_as_they_were(tmp_path, monkeypatch):
    """They build a trainer, which seeds all generators, and split the data."""
    rows = write_rows(tmp_path / "rows", count=9)
    recipe = write_recipe(tmp_path, dataset_name=None, datasets=[{"path": str(rows)}], test_split_size=0.2)
    overrides = ["--use_cpu", "true", "--full_determinism", "true", "--output_dir", str(tmp_path / "out")]
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)

    def draws() -> list[float]:
        return [random.random(), numpy.random.random(), torch.rand(1).item()]

    def set_states() -> None:
        random.seed(1)
        numpy.random.seed(2)
        torch.manual_seed(3)

    set_states()
    wanted = draws()
    set_states()
    seeded.clear()
    deterministic = torch.are_deterministic_algorithms_enabled()
    run, _ = preflight(recipe, recipes.read_recipe_file(recipe), overrides, {})
    assert run is not None
    assert draws() == wanted
    assert seeded == []
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed finds the GPU")
def test_deepspeed_does_not_say_that_there_is_no_gpu(monkeypatch):
    logger = logging.getLogger("DeepSpeed")
    said = []
    monkeypatch.setattr(logger, "callHandlers", said.append)
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for lines in (1, 0):  # without what drops it, and with it
        monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
        real_accelerator.get_accelerator()
        assert len(said) == lines
        said.clear()
        quieten_loggers()
