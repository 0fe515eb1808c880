"""SIGTERM and SIGUSR1 lose nothing, whatever the run does just then, and the same command goes on: also over another
number of processes."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.resuming import LORA, arguments, largest, resume_recipe
from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint.resume import numbered
from zero_recipes.core.files import write_json
from zero_recipes.core.host import hardware_facts, library_versions

RESULT = ROOT / "benchmarks" / "results" / "signals.json"
SAMPLED = {"sample_prompts": 8, "sample_max_new_tokens": 4, "per_device_eval_batch_size": 2, "save_model": True}
SAMPLED |= {"dataset_test_split": "test"}
# one after another: (where, its how manieth call, on which rank), and the step that is saved then
SIGNALS = [("training_step", 5, 1, 3), ("_save_rng_state", 1, 0, 5), ("prediction_step", 7, 1, 7)]
SIGNALS += [("generate_texts", 1, 0, 7)]


def kept(out: Path) -> tuple:
    """What a run has measured and answered, but for its times."""
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["status"] == "ok"
    figures = [metrics[key] for key in ("loss_history", "grad_norm_history", "eval_history", "tokens")]
    return figures, (out / "samples.jsonl").read_text()


def test_signals_in_every_phase_then_the_same_command(two, tmp_path):
    """In a step, in a save, in an evaluation, and while the samples are asked after training."""
    recipe = resume_recipe(tmp_path, **SAMPLED)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert two.run("signalled.train_signalled", argv=arguments(recipe, "zero2", whole)) == ["done", "done"]
    argv = arguments(recipe, "zero2", out)
    for place, number, rank, step in SIGNALS:
        signals = {"place": place, "number": number, "rank": rank, "name": ("SIGTERM", "SIGUSR1")[rank]}
        endings = two.run("signalled.train_signalled", argv=argv, **signals)
        assert f"it is saved as {out}/checkpoint-{step}." in endings[0] and endings[0] == endings[1], place
        assert json.loads((out / "metrics.json").read_text())["status"] == "preempted"
    assert two.run("signalled.train_signalled", argv=argv) == ["done", "done"]
    assert kept(out) == kept(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def launched(recipe: Path, out: Path, strategy: str, processes: int, sent: str = "9:0:SIGTERM:self") -> dict:
    """`zero-recipes train` from a folder whose run_sft.py is tests/helpers/signalled.py."""
    folder, note = recipe.parent, recipe.parent / "sent.json"
    (folder / "run_sft.py").write_text((ROOT / "tests" / "helpers" / "signalled.py").read_text())
    note.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SIGNAL": sent, "SENT": str(note)}
    environment |= {"PYTHONPATH": str(ROOT), "ROOT": str(ROOT)}
    command = [sys.executable, "-m", "zero_recipes.cli.main", "train", str(recipe), "--output_dir", str(out)]
    command += ["--config_file", f"{strategy}.yaml", "--num_processes", str(processes)]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    now, found = time.time(), json.loads(note.read_text()) if note.is_file() else {}
    assert ended.returncode in (0, 75), (ended.stdout + ended.stderr)[-4000:]
    return found | {"code": ended.returncode, "seconds": round(now - found.get("time", now), 1)}


def drawn(draw: random.Random, calls: int, processes: int = 2) -> str:
    number, name = draw.randint(1, max(1, calls)), draw.choice(["SIGTERM", "SIGUSR1"])
    return f"{draw.randrange(processes)}:{number}:{name}:{draw.choice(['self', 'launcher'])}"


def keep(**found) -> None:
    document = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    document |= {"hardware": hardware_facts("cpu"), "versions": library_versions()}
    for part, entry in found.items():
        document[part] = document.get(part, {}) | entry
    write_json(RESULT, document)


@pytest.mark.grid
@pytest.mark.launch
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp", "fsdp2"])
def test_four_signals_at_drawn_moments(tmp_path, strategy):
    """Any call of a training, evaluation, sampling or saving batch, any rank or the launcher, either signal."""
    recipe, draw = resume_recipe(tmp_path, **SAMPLED), random.Random(strategy)
    whole, out = tmp_path / "whole", tmp_path / "out"
    calls, signals = launched(recipe, whole, strategy, 2)["calls"], []
    while len(signals) < 4:
        sent = drawn(draw, calls // 2)
        ended = launched(recipe, out, strategy, 2, sent)
        if ended["code"]:
            step = max(int(path.name.split("-")[1]) for path in numbered(out))
            signals.append({"sent": sent, "in": ended["in"], "seconds_to_the_end": ended["seconds"], "saved": step})
        else:  # it was over before
            assert kept(out) == kept(whole)
            out = tmp_path / f"out{len(signals)}"
    launched(recipe, out, strategy, 2)
    assert kept(out) == kept(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    keep(same_processes={strategy: {"signals": signals, "steps": 7, "loss": 0.0, "weights": 0.0}})


@pytest.mark.grid
@pytest.mark.launch
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "ddp", "fsdp2", "zero2 lora", "zero2 stream"])
def test_two_one_two_processes(tmp_path, name):
    """The same command, while the number of processes changes: as many steps over as many tokens, nearly the losses."""
    keys = {"max_steps": 9, "gradient_accumulation_steps": 2, "bf16": False, "eval_strategy": "steps", "eval_steps": 5}
    strategy, _, kind = name.partition(" ")
    keys |= {"": {}, "lora": LORA | {"lora_dropout": 0}, "stream": {"dataset_streaming": True}}[kind]
    recipe, draw = write_recipe(tmp_path, **keys, **SAMPLED), random.Random(name)
    whole, out = tmp_path / "whole", tmp_path / "out"
    launched(recipe, whole, strategy, 2)
    signals = []
    for processes in (2, 4 if strategy == "fsdp2" else 1):  # FSDP needs two at least (ZR316)
        sent = drawn(draw, 12 // processes, processes)  # of a step's micro batches
        ended = launched(recipe, out, strategy, processes, sent)
        assert ended["code"] == 75
        signals.append({"processes": processes, "sent": sent, "in": ended["in"]})
    launched(recipe, out, strategy, 2)
    assert not list(out.glob("checkpoint-*-world*")), "what was resharded is deleted"
    one, other = (json.loads((folder / "metrics.json").read_text()) for folder in (whole, out))
    assert one["tokens"] == other["tokens"] and len(other["resumed_at"]) == 2
    gap = largest(one["loss_history"], other["loss_history"]) / min(one["loss_history"])
    keep(two_one_two={name: {"signals": signals, "saved": other["resumed_at"], "steps": 9, "relative_loss": gap}})
    assert gap < 1e-5
