"""How a run ends is in its metrics.json: divergence, the first cause of a crash, a run that is killed while loading."""

from __future__ import annotations

import itertools
import json
import math
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.sample_cases import strict
from zero_recipes.checkpoint.saved_model import NotWhole, entries_of, refuse_nonfinite
from zero_recipes.core.findings import Finding, Refusal
from zero_recipes.metrics.failure import RankFailure, cause_of, keep_failure
from zero_recipes.metrics.schema import FILE, SCHEMA, Metrics
from zero_recipes.training.divergence import Diverged, StopAtDivergence
from zero_recipes.training.recorder import UNFINISHED, RunRecorder


def stop(limit: int, precision: str = "bf16"):
    metrics = SimpleNamespace(identity=SimpleNamespace(precision=precision), last_step=(1.0, 1.0))
    return StopAtDivergence(metrics, limit), metrics


def run_through(limit, steps, precision="bf16") -> tuple[int, StopAtDivergence]:
    """(steps until the run is ended, the callback); `steps`: loss and gradient norm of each."""
    callback, metrics = stop(limit, precision)
    for number, metrics.last_step in enumerate(steps, start=1):
        control = SimpleNamespace(should_training_stop=False, should_save=True, should_evaluate=True)
        callback.on_step_end(SimpleNamespace(process_index=0), SimpleNamespace(global_step=number), control)
        if control.should_training_stop:
            assert not control.should_save and not control.should_evaluate
            return number, callback
    return len(steps), callback


@pytest.mark.parametrize("seed", range(30))
def test_as_many_steps_in_a_row_as_the_key_says_end_a_run(seed, capsys):
    draw = random.Random(seed)
    limit, precision = draw.randint(1, 4), draw.choice(["bf16", "fp16", "fp32"])
    numbers = [1.0, 2.5, 1e30, math.nan, math.inf, -math.inf]
    steps = [(draw.choice(numbers), draw.choice(numbers)) for _ in range(12)]
    bad = [not math.isfinite(loss) or (precision != "fp16" and not math.isfinite(norm)) for loss, norm in steps]
    rows = [all(bad[end - limit : end]) for end in range(limit, 13)]
    expected = rows.index(True) + limit if True in rows else 12
    ended, callback = run_through(limit, steps, precision)
    assert ended == expected and (callback.in_a_row >= limit) == (True in rows)
    printed = capsys.readouterr().out
    kinds = {"loss": [loss for loss, _ in steps[:ended]], "gradient norm": [norm for _, norm in steps[:ended]]}
    for kind, values in kinds.items():
        wrong = any(not math.isfinite(value) for value in values) and (kind == "loss" or precision != "fp16")
        assert printed.count(f"the {kind} is") == wrong, "once for each kind"


def test_an_overflow_of_the_loss_scale_in_fp16_is_no_divergence():
    assert run_through(3, [(2.0, math.inf)] * 20, "fp16")[0] == 20
    assert run_through(3, [(2.0, math.inf)] * 20, "fp32")[0] == 3


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_overflow_at_the_smallest_scale_is_one(tmp_path, precision):
    """DeepSpeed's own words; any other error, and those words elsewhere, stay what they were."""
    metrics = SimpleNamespace(identity=SimpleNamespace(precision=precision))
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=tmp_path), state=SimpleNamespace(global_step=4))
    callback = StopAtDivergence(metrics, 3)
    text = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    with (
        pytest.raises(Diverged if precision == "fp16" else Exception) as caught,
        callback.at_the_smallest_scale(trainer),
    ):
        raise Exception(text)  # DeepSpeed raises no other kind
    named = "the gradients of step 5 overflow fp16" if precision == "fp16" else text
    assert named in str(caught.value) and isinstance(caught.value, Diverged) == (precision == "fp16")
    with pytest.raises(ValueError, match="another"), callback.at_the_smallest_scale(trainer):
        raise ValueError("another")


# the numbers of a saved model


@pytest.mark.parametrize("seed", range(8))
def test_numbers_that_are_not_finite_are_found_wherever_they_are(tmp_path, seed):
    draw = random.Random(seed)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    tensors = {f"t{i}": torch.randn(draw.randint(1, 9), 3).to(draw.choice(dtypes)) for i in range(5)}
    tensors |= {"ints": torch.arange(7), "eight": torch.zeros(3, dtype=torch.float8_e4m3fn)}
    for place in (None, draw.randrange(5)):
        if place is not None:
            tensors[f"t{place}"].view(-1)[-1] = draw.choice([math.nan, math.inf, -math.inf])
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(NotWhole, match=f"t{place} has 1 numbers") if place is not None else nullcontext():
            refuse_nonfinite(entries_of(tmp_path))


# the first cause


GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29"
NOISE = [GLOO, "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "RuntimeError: Connection reset by peer"]
NOISE += [
    "DistNetworkError: failed to recv",
    "RuntimeError: rank 0, which prepares the data of this machine, failed: x",
]


def failure(rank: int, error: str, time: float, status: str = "failed") -> RankFailure:
    return RankFailure(rank=rank, status=status, phase="train", error=error, largest_memory=[], time=time)


@pytest.mark.parametrize("seed", range(30))
def test_the_first_cause_is_named_whoever_writes_first(tmp_path, seed):
    """The noise of the others may be written before it (clocks differ); every order of writing ends the same."""
    draw = random.Random(seed)
    ranks = draw.sample(range(8), 4)
    cause = failure(ranks[0], "ValueError: a row is broken", 100.0)
    later = failure(ranks[1], "ValueError: it broke later", 101.0)
    noise = [failure(rank, draw.choice(NOISE), draw.uniform(90, 110)) for rank in ranks[2:]]
    if draw.random() < 0.5:
        cause = failure(ranks[0], "OutOfMemoryError: CUDA out of memory", 105.0, "oom")
    unfinished = Metrics(schema=SCHEMA, status="failed", error=UNFINISHED, name="n", strategy="zero2")
    losses = [2.0, 1.0, math.nan]
    everyone = [cause, later, *noise]
    draw.shuffle(everyone)
    for each in everyone:
        (tmp_path / f"failure.rank{each.rank}.json").write_text(each.model_dump_json())
        keep_failure(tmp_path, each, losses[: draw.choice([0, 3])], unfinished, resumes=False)
    keep_failure(tmp_path, everyone[-1], losses, unfinished, resumes=False)
    assert cause_of(tmp_path) == cause
    row = strict((tmp_path / FILE).read_text())
    assert (row["status"], row["error"], row["failure"]["rank"]) == (cause.status, cause.error, cause.rank)
    assert row["loss_history"] == [2.0, 1.0, None] and row["first_nonfinite_step"] == 3


def test_a_damaged_failure_file_of_another_rank_does_not_hide_this_ones(tmp_path):
    (tmp_path / "failure.rank3.json").write_text("{")
    unfinished = Metrics(schema=SCHEMA, status="failed", error=UNFINISHED, name="n", strategy="zero2")
    keep_failure(tmp_path, failure(0, "it broke", 1.0), [], unfinished, resumes=False)
    assert Metrics.read(tmp_path / FILE).error == "it broke"


# a run that ends while it loads


def recorder(folder, checkpoint=None, monkeypatch=None) -> RunRecorder:
    settings = SimpleNamespace(model_name_or_path="m")
    recipe = SimpleNamespace(name="r.yaml", sha256="ab", settings=settings)
    strategy = SimpleNamespace(name="zero2", zero_stage=2, world_size=2)
    run = SimpleNamespace(output_dir=folder, checkpoint=checkpoint, recipe=recipe, strategy=strategy, device="cpu")
    return RunRecorder(run)


def finished(folder, **changes):
    text = json.dumps(
        {"schema": 1, "status": "oom", "name": "old", "strategy": "zero2", "loss_history": [1.5]} | changes
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text)
    return text


@pytest.mark.parametrize(("before", "resumes"), itertools.product([None, "oom", "damaged", "ok"], [False, True]))
def test_a_run_that_is_killed_refused_or_breaks_while_loading(tmp_path, before, resumes):
    """Killed: no metrics.json says ok of a run that goes on. Refused: the folder is as it was. Broken: it says why."""
    folder = tmp_path / "new" / "out"
    if before is not None:
        finished(folder, **{"damaged": {"schema": 7}, "ok": {}, "oom": {}}[before])
    if before == "ok":
        from tests.unit.test_metrics import OLDEST

        (folder / FILE).write_text(json.dumps(OLDEST))
    text = (folder / FILE).read_text() if before else None
    checkpoint = "checkpoint-1" if resumes else None

    found = recorder(folder, checkpoint)
    with pytest.raises(Refusal), found.on_failure(), found.loading():
        killed = strict((folder / FILE).read_text())
        raise Refusal([Finding("ZR000", "what", "why", "fix")])
    if resumes or before is None:
        assert (killed["status"], killed["error"]) == ("failed", UNFINISHED)
    else:
        assert killed == json.loads(text)
    assert (folder / FILE).read_text() == text if before else not (tmp_path / "new").exists()

    found = recorder(folder, checkpoint)
    with pytest.raises(MemoryError), found.on_failure(), found.loading():
        raise MemoryError("no room")
    left = strict((folder / FILE).read_text())
    if before == "ok" and not resumes:
        assert left == json.loads(text), "the files of the run that was to be overwritten still stand"
    else:
        assert (left["status"], left["error"]) == ("oom", "MemoryError: no room")
        assert left["failure"]["phase"] == "model" and left["failure"]["cures"]
    assert strict((folder / "failure.rank0.json").read_text())["status"] == "oom"


def test_what_fails_once_the_run_is_finished_leaves_its_metrics(tmp_path):
    text, found = finished(tmp_path, status="oom"), recorder(tmp_path)
    found.finished = True
    with pytest.raises(OSError, match="upload"), found.on_failure():
        raise OSError("upload")
    assert (tmp_path / FILE).read_text() == text
