"""`sweep --set` and `tune`: what they read, refuse, try and call their runs, without a launch; and the report."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.helpers import fake_cuda
from tests.helpers.report_runs import metrics, save
from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.tools import refusal_of
from zero_recipes.config import recipe as recipes
from zero_recipes.config.keys import key_types
from zero_recipes.config.read import parse_recipe
from zero_recipes.metrics.read_runs import SweptRun, add_to_sweep_file, read_runs, read_sweep_file
from zero_recipes.metrics.schema import Metrics
from zero_recipes.tools import main as cli
from zero_recipes.tools import sweep, tune
from zero_recipes.tools.plan.job import read_recipe
from zero_recipes.tools.report import tables
from zero_recipes.tools.sweep import SweepRun, parse_sets, runs_of

CONFIGS = {name: ROOT / "accelerate_configs" / f"{name}.yaml" for name in ("zero2", "zero3")}
BUCKET = "zero_optimization.reduce_bucket_size"


@pytest.fixture(scope="module")
def types():
    return key_types()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(*sets, strategies=("zero2",)):
    return runs_of({name: CONFIGS[name] for name in strategies}, sets)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (" seed = 1 , 2 ", (1, 2)),
        ("max_length=500,null", (500, None)),
        ("learning_rate=1e-5,0.1", ("1e-5", 0.1)),
        ('packing=true,no,null,"no"', (True, False, None, "no")),
        ("lora_target_modules=[a, b],[c],all-linear", (["a", "b"], ["c"], "all-linear")),
        ("model_init_kwargs={a: 1, b: [2, 300]},{}", ({"a": 1, "b": [2, 300]}, {})),
        ('run_name=it\'s,a=b,"c,d"', ("it's", "a=b", "c,d")),
    ],
)
def test_values_are_yaml_by_comma(text, values, types):
    (found,) = parse_sets([text], types).values()
    assert [(type(value), value) for value in found] == [(type(value), value) for value in values]


@pytest.mark.parametrize(
    ("sets", "code", "said"),
    [
        (["seed="], "ZR355", "comma-separated"),
        (["max_length=500,500"], "ZR355", "distinct"),
        (["run_name=2026-01-01"], "ZR355", "JSON"),
        (["seed=1", "seed=2"], "ZR355", "of its own"),
        (["per_device_train_batch_sise=2"], "ZR103", "`per_device_train_batch_size`"),
        (["torch_dtype=bfloat16"], "ZR101", "`dtype`"),
        (["num_processes=2,4"], "ZR102", "launcher"),
        ([f"{BUCKET}=5e5"], "ZR103", "reduce_bucket_size"),
        (["overwrite=true"], "ZR358", "--overwrite"),
    ],
    ids=str,
)
def test_what_cannot_be_swept_is_refused_by_name(sets, code, said, types):
    refusal = refusal_of(parse_sets, sets, types)
    assert refusal.codes == [code] and said in str(refusal)


def test_several_keys_make_all_combinations_the_last_changing_fastest():
    found = [(*run.values.items(),) for run in planned("seed=1,2,3", "packing=true,false")]
    assert found == [(("seed", seed), ("packing", packing)) for seed in (1, 2, 3) for packing in (True, False)]


def test_names_say_the_values_and_are_safe_and_unique():
    text = "run_name=a/b,a_b,a b,../../c,A_B,é," + "x" * 300 + "," + "x" * 301 + ",[a],null,a=b"
    names = [run.name for run in planned(text, strategies=("zero2", "zero3"))]
    assert len(set(names)) == len(names) == 22
    assert all(re.fullmatch(r"[A-Za-z0-9._+,=-]{1,160}", name) and ".." not in Path(name).parts for name in names)
    (plain,) = planned("packing=true", "learning_rate=1e-5")
    assert plain.name == "zero2,packing=true,learning_rate=1e-5"


@pytest.mark.parametrize(
    ("key", "value"),
    [("packing", True), ("max_length", None), ("learning_rate", "1e-5"), ("run_name", "--x y"), ("max_steps", -1),
     ("lora_target_modules", ["a", "b"]), ("model_init_kwargs", {"revision": "x"})],
)  # fmt: skip
def test_the_run_gets_the_value_that_was_meant(key, value, recipe):
    mapping = recipes.read_recipe_file(recipe)
    parsed = parse_recipe(recipe, mapping, ["--save_steps", "7", *SweepRun("zero2", recipe, {key: value}).words])
    meant = 1e-5 if value == "1e-5" else value
    assert parsed.explicit[key] == meant and type(parsed.explicit[key]) is type(meant)


@pytest.fixture
def launched(monkeypatch):
    """The command lines of a sweep, of which none is run."""
    commands = []
    monkeypatch.setattr(sweep, "run_logged", lambda command, *_: (commands.append(command), (1, "it broke"))[1])
    return commands


def swept(recipe, folder: Path, *words, strategies="ddp") -> int:
    return cli.main(["sweep", str(recipe), "--strategies", strategies, "--output_dir", str(folder / "out"), *words])


@pytest.mark.parametrize(
    ("words", "saves"),
    [([], False), (["--save_model=true"], True), (["--save_strategy", "steps"], True), (["--seed", "1"], False)],
)
def test_a_sweep_saves_what_its_command_line_names(recipe, tmp_path, launched, words, saves):
    swept(recipe, tmp_path, *words)
    (command,) = launched
    assert ("--save_model" not in command) == saves and command[len(command) - len(words) :] == words


@pytest.mark.parametrize(
    ("words", "replaced"),
    [([], False), (["--overwrite=true"], True), (["--overwrite", "true"], True), (["--overwrite", "False"], False)],
)
def test_earlier_results_are_replaced_by_overwrite_alone(recipe, tmp_path, launched, capsys, words, replaced):
    save(tmp_path / "out" / "ddp", metrics("ddp"))
    before = (tmp_path / "out" / "ddp" / "metrics.json").read_text()
    code = swept(recipe, tmp_path, *words)
    assert (len(launched), code) == ((1, 1) if replaced else (0, 2))
    kept = tmp_path / "out" / ("ddp.previous" if replaced else "ddp") / "metrics.json"
    assert kept.read_text() == before and ("ZR329" in capsys.readouterr().err) != replaced


@pytest.mark.parametrize("folder", ["ddp", "ddp.previous"])
def test_what_a_run_reads_is_not_overwritten_by_its_sweep(recipe, tmp_path, launched, capsys, folder):
    """`ddp` is renamed, and the `ddp.previous` of an earlier sweep deleted, before the run itself could refuse it."""
    save(tmp_path / "out" / "ddp", metrics("ddp"))
    save(tmp_path / "out" / "ddp.previous", metrics("ddp"))
    mine = tmp_path / "out" / folder / "rows" / "train.jsonl"
    mine.parent.mkdir()
    mine.write_text("{}\n")
    assert swept(recipe, tmp_path, "--overwrite", "true", "--dataset_name", str(mine.parent)) == 2
    assert "ZR75" in capsys.readouterr().err and mine.is_file() and not launched


def test_a_run_shows_its_loss_and_not_raw_lines(tmp_path, capsys):
    logged = "step 10 of 40: loss 1.613, 92 tokens/s, grad_norm 2"
    command = [sys.executable, "-c", f"print('loading'); print({logged!r}); raise SystemExit(3)"]
    code, log = sweep.run_logged(command, tmp_path, "[1/1] ddp", sweep.terminal(), 1)
    assert code == 3 and log == f"loading\n{logged}" and logged in (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "[1/1] ddp: step 10 of 40: loss 1.613"


def test_a_sweep_into_the_folder_of_another_keeps_its_runs(tmp_path):
    first = [SweptRun(folder=name, strategy="zero2", values={"seed": name}) for name in "ab"]
    add_to_sweep_file(tmp_path, first)
    again = SweptRun(folder="b", strategy="zero3", values={"seed": 1})
    add_to_sweep_file(tmp_path, [again])
    assert read_sweep_file(tmp_path).runs == [first[0], again]


def test_the_table_begins_with_the_values_and_ends_with_why(tmp_path):
    failure = {"code": "ZR211", "reason": "a bucket"}
    refused = {"status": "refused", "error": "the words decide nothing", "failure": failure}
    listed = []
    for bucket, changes in ((500_000, {}), (5 * 10**18, refused)):
        save(tmp_path / str(bucket), metrics("zero2") | changes)
        listed.append(SweptRun(folder=str(bucket), strategy="zero2", values={BUCKET: bucket, "seed": 1}))
    add_to_sweep_file(tmp_path, listed)
    _, named, measured, _, chosen = tables.sweep_table(read_runs(tmp_path))
    assert [column.header for column in named] == [BUCKET, "seed"]
    assert [column.cell(chosen[0]) for column in named] == ["500,000", "1"]
    assert [column.cell(chosen[-1]) for column in measured][-2:] == ["refused", "ZR211 a bucket"]


def test_a_damaged_list_of_values_is_refused_and_kept(recipe, tmp_path, capsys):
    (tmp_path / "sweep.json").write_text('{"schema": 2')
    sets = ["--set", "per_device_train_batch_size=0", "--output_dir", str(tmp_path), "--strategies", "zero2"]
    assert cli.main(["sweep", str(recipe), *sets]) == 2 and "ZR199" in capsys.readouterr().err
    assert (tmp_path / "sweep.json").read_text() == '{"schema": 2'


# tune: what it tries, goes on with and writes; the runs themselves are made up


@pytest.fixture
def packable(tmp_path):
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 256}
    return write_recipe(tmp_path, **keys)


@pytest.fixture
def ran(monkeypatch):
    """[(strategy, options)] of all runs. Packs are twice as fast, at stage 2 most; at stage 1 they are faster still,
    with another loss; a micro batch of 4 fails. Other load slows stage 2 down in the second round."""
    commands = []

    def run(command, folder, *_):
        words = dict(word[2:].split("=") for word in command if word.startswith("--") and "=" in word)
        strategy = Path(command[command.index("--config_file") + 1]).stem
        commands.append((strategy, words))
        if words.get("per_device_train_batch_size") == "4":
            return 1, "it broke"
        packed, steps = "packing" in words, int(words["max_steps"])
        odd = packed and strategy == "zero1"
        seconds = {"zero1": 0.1 if odd else 1.0, "zero2": 0.9}.get(strategy, 1.0) / (2 if packed else 1)
        seconds *= 10 if packed and strategy == "zero2" and steps == 24 else 1
        timed = {"median": seconds, "p90": seconds, "warmup_steps_excluded": 2}
        tokens = {"all": 100 * steps, "non_padding": 100 * steps, "supervised": steps}
        history = [2.0 if odd else 1.0] * steps
        save(folder, metrics(strategy, step_seconds=timed, tokens=tokens, loss_history=history))
        return 0, ""

    monkeypatch.setattr(sweep, "run_logged", run)
    monkeypatch.setattr(tune.Host, "memory", lambda host: (64 * 10**9, ""))  # whatever else this machine does
    return commands


def test_the_fastest_with_the_same_loss_is_written(packable, tmp_path, ran, capsys):
    argv = ["tune", str(packable), "--output_dir", str(tmp_path / "runs"), "--strategies", "ddp,zero1,zero2"]
    assert cli.main(argv) == 0
    new = packable.with_suffix(".tuned.yaml")
    text, table = new.read_text(), capsys.readouterr().out
    before, after = yaml.safe_load(packable.read_text()), yaml.safe_load(text)
    length, passes = after["max_length"], after["gradient_accumulation_steps"]
    changed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": passes, "packing": True}
    assert after == before | changed | {"max_length": length}
    mean = tune.rows_at_hand(read_recipe(packable, []).settings, packable).mean
    assert 4 * mean <= passes * length < 5 * mean, "a step has other tokens"
    assert "--config_file accelerate_configs/zero2.yaml" in text
    odd = {str(w) for s, w in ran if s == "zero1" and "packing" in w and w["max_steps"] == "12"}
    assert table.count("loss differs") == len(odd)
    assert table.count(" failed ") == 3 and "zero2, 4 x 1: failed" in text
    rounds = [sum(words["max_steps"] == str(steps) for _, words in ran) for steps in (12, 24, 48)]
    assert (
        rounds[0] == len(set(re.findall(r"^#   (.*):", text, re.M))) and rounds[0] > 2 * rounds[1] > 2 * rounds[2] > 0
    )
    assert cli.main(argv) == 2 and "ZR863" in capsys.readouterr().err


def test_the_faster_half_of_the_candidates_goes_on_until_two_are_left():
    """Of an odd number the larger half. None goes on whose loss is another one's, or whose run has failed."""
    rounds: dict[int, list[str]] = {}
    speeds = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.0, "other loss": 9.0, "broken": 9.0}

    def measure(run: SweepRun, steps: int, place: str) -> tune.Row:
        rounds.setdefault(steps, []).append(run.name)
        tokens = {"all": 100 * steps, "non_padding": 100 * steps, "supervised": steps}
        timed = {"median": 60 / speeds[run.strategy], "p90": 60.0, "warmup_steps_excluded": 2}
        history = [2.0 if run.strategy == "other loss" else 1.0] * steps
        row = metrics("ddp", step_seconds=timed, tokens=tokens, loss_history=history)
        status = "failed" if run.strategy == "broken" else "ok"
        return tune.Row(run, steps, Metrics.model_validate(row | {"status": status}), seconds=1.0)

    field = [SweepRun(name, Path("x.yaml"), {}) for name in speeds]
    rows = tune.halved(field, measure, 1e9, Console(quiet=True))
    named = [row.run.strategy for row in rows]
    assert [len(names) for names in rounds.values()] == [7, 3, 2] and list(rounds) == [12, 24, 48]
    assert named[:5] == ["a", "b", "c", "d", "e"] and {*named[5:]} == {"other loss", "broken"}


def test_short_steps_are_measured_for_seconds(monkeypatch, ran, packable, tmp_path):
    """Twelve steps of 0.06 s differ by more than 10 % from run to run."""
    monkeypatch.setattr(tune, "FIRST_SECONDS", 50.0)  # of steps of a second
    argv = ["tune", str(packable), "--output_dir", str(tmp_path / "runs"), "--strategies", "ddp,zero2"]
    argv += ["--minutes", "60"]
    assert cli.main(argv) == 0
    steps = [words["max_steps"] for _, words in ran]
    assert steps[0] == "12" and steps[1] == "50" and set(steps[1:]) == {"50", "100", "200"}


def test_a_tune_that_is_too_short_says_so_and_writes_nothing(ran, packable, tmp_path, capsys):
    argv = ["tune", str(packable), "--output_dir", str(tmp_path / "runs"), "--strategies", "ddp,zero2"]
    assert cli.main([*argv, "--minutes", "1e-9"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert len(ran) == 1 and "too short to compare" in said and "all take about --minutes" in said
    assert not packable.with_suffix(".tuned.yaml").exists()


def test_tune_makes_no_context_on_a_gpu_that_its_runs_need(monkeypatch, ran, packable, tmp_path):
    """One takes half a GB: `mem_get_info` makes one, the device's properties do not."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.mem_get_info", None)
    argv = ["tune", str(packable), "--output_dir", str(tmp_path / "runs"), "--strategies", "zero2"]
    assert cli.main([*argv, "--num_processes", "2"]) == 0 and ran


def test_a_recipe_that_recomputes_is_tried_without(packable, tmp_path, ran):
    read = read_recipe(packable, ["--activation_checkpointing", "true", "--max_length", "16"])
    found = tune.candidates(read, 2, 10**12, "cpu", ["ddp", "zero2"])
    assert not found[0].values and [run.strategy for run in found if not run.values] == ["ddp", "zero2"]
    assert {"activation_checkpointing": False} in [run.values for run in found]
    assert not any("packing" in run.values for run in found), "rows are cut"
    assert refusal_of(tune.candidates, read, 2, 10**6, "cpu", None).codes == ["ZR862"]


def test_tune_tries_larger_micro_batches_with_less_accumulation():
    read = read_recipe(ROOT / "recipes" / "pythia-full.yaml", [])  # 4 x 2, whose rows are not at hand
    sizes = [tuple(split.values()) for split in tune.batches(read, 2)]
    assert sizes == [(), (8, 1), (2, 4), (1, 8)]
    derived = read_recipe(ROOT / "recipes" / "qwen3-8b.yaml", ["--packing", "false"])  # 1 x 8 on two processes
    splits = tune.batches(derived, 2)
    assert splits[1] == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "global_batch_size": 16}
