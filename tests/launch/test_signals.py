"""SIGTERM, SIGUSR1 and Ctrl-C lose nothing, whatever the run does just then, and the same command goes on: also over
another number of processes."""

import json
from pathlib import Path

import pytest

from tests.helpers import ending_cases
from tests.helpers.resuming import LORA, largest, resume_recipe
from tests.helpers.seeded import count, draw
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.checkpoint.folders import numbered

SAMPLED = {"sample_prompts": 8, "sample_max_new_tokens": 4, "per_device_eval_batch_size": 2, "save_model": True}
SAMPLED |= {"dataset_test_split": "test"}
# one after another: (where, its how manieth call, on which rank), and the step that is saved then
SIGNALS = [("training_step", 5, 1, 3), ("_save_rng_state", 1, 0, 5), ("prediction_step", 7, 1, 7)]
SIGNALS = [[*SIGNALS, ("generate_texts", 1, 0, 7)], [("prediction_step", 2, 1, 5)]]
NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")


def kept(out: Path) -> tuple:
    """What a run has measured and answered, but for its times."""
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["status"] == "ok"
    figures = [metrics[key] for key in ("loss_history", "grad_norm_history", "eval_history", "tokens")]
    return figures, (out / "samples.jsonl").read_text()


@pytest.fixture(scope="module")
def undisturbed(two, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe, folder) of a run that no signal has reached."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = resume_recipe(folder, **SAMPLED)
    argv = arguments(recipe, "zero2", folder / "whole")
    assert two.run(ending_cases.train_signalled, argv=argv) == ["done", "done"]
    return recipe, folder / "whole"


@pytest.mark.parametrize("signals", SIGNALS)
def test_signals_in_every_phase_then_the_same_command(two, undisturbed, tmp_path, signals):
    """In a step, in a save, in an evaluation, and while the samples are asked after training."""
    (recipe, whole), out = undisturbed, tmp_path / "out"
    argv = arguments(recipe, "zero2", out)
    for place, number, rank, step in signals:
        sent = {"place": place, "number": number, "rank": rank, "name": NAMES[(number + step) % 3]}
        endings = two.run(ending_cases.train_signalled, argv=argv, **sent)
        assert f"it is saved as {out}/checkpoint-{step}." in endings[0] and endings[0] == endings[1], place
        assert json.loads((out / "metrics.json").read_text())["status"] == "preempted"
    assert two.run(ending_cases.train_signalled, argv=argv) == ["done", "done"]
    assert kept(out) == kept(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp", "fsdp2"])
def test_four_signals_at_drawn_moments(two, tmp_path, strategy):
    """Any call of a training, evaluation, sampling or saving batch, either rank, either signal."""
    recipe, chance = resume_recipe(tmp_path, **SAMPLED), draw("signals", strategy)
    whole, out, signals = tmp_path / "whole", tmp_path / "out", []

    def run(folder: Path, **sent) -> str:
        return two.run(ending_cases.train_signalled, argv=arguments(recipe, strategy, folder), **sent)[0]

    assert run(whole) == "done"
    while len(signals) < 4:
        sent = {"rank": chance.randrange(2), "number": chance.randint(1, 14), "name": chance.choice(NAMES)}
        if run(out, **sent, place=None) == "done":  # it was over before
            assert kept(out) == kept(whole)
            out = tmp_path / f"out{len(signals)}"
        else:
            signals.append(sent | {"saved": max(int(path.name.split("-")[1]) for path in numbered(out))})
    assert run(out) == "done"
    assert kept(out) == kept(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    count("signals", strategy, number=len(signals), steps=7, loss=0.0, weights=0.0, signals=signals)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "ddp", "fsdp2", "zero2 lora", "zero2 stream"])
def test_two_one_two_processes(request, two, tmp_path, name):
    """The same command, while the number of processes changes: as many steps over as many tokens, nearly the losses."""
    keys = {"max_steps": 9, "gradient_accumulation_steps": 2, "bf16": False, "eval_strategy": "steps", "eval_steps": 5}
    strategy, _, kind = name.partition(" ")
    keys |= {"": {}, "lora": LORA | {"lora_dropout": 0}, "stream": {"dataset_streaming": True}}[kind]
    recipe, chance = write_recipe(tmp_path, **keys, **SAMPLED), draw("processes", name)
    whole, out = tmp_path / "whole", tmp_path / "out"
    two.run(ending_cases.train_signalled, argv=arguments(recipe, strategy, whole))
    signals = []
    for group in (two, request.getfixturevalue("four" if strategy == "fsdp2" else "one")):  # ZR316: FSDP needs two
        processes = group.world_size
        sent = {"rank": chance.randrange(processes), "number": chance.randint(1, 12 // processes)}  # of micro batches
        sent |= {"name": chance.choice(NAMES)}
        endings = group.run(ending_cases.train_signalled, argv=arguments(recipe, strategy, out), place=None, **sent)
        assert "it is saved as" in endings[0]
        signals.append({"processes": processes} | sent)
    assert two.run(ending_cases.train_signalled, argv=arguments(recipe, strategy, out)) == ["done", "done"]
    assert not list(out.glob("checkpoint-*-world*")), "what was resharded is deleted"
    one, other = (json.loads((folder / "metrics.json").read_text()) for folder in (whole, out))
    assert one["tokens"] == other["tokens"] and len(other["resumed_at"]) == 2
    gap = largest(one["loss_history"], other["loss_history"]) / min(one["loss_history"])
    assert gap < 1e-5
    found = {"number": len(signals), "saved": other["resumed_at"], "steps": 9, "relative_loss": gap}
    count("signals, other processes", name, **found, signals=signals)
