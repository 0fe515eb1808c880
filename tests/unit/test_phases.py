"""The phases of a run: each training of a process counts its own time."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig

from tests.helpers.bad_data import BASE
from tests.helpers.tiny import llama_config
from zero_recipes.core import process
from zero_recipes.core.process import PhaseClock
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.schema import FILE, Metrics
from zero_recipes.training.trainer import ZeroSFTTrainer

ROWS = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 2


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which passes where a test adds to it."""
    now = [100.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def plain(folder, steps: int, ticking) -> Trainer:
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=steps, save_strategy="no")
    model = LlamaForCausalLM(llama_config(num_hidden_layers=1))
    return Trainer(model, args, train_dataset=ROWS, callbacks=[StageMetricsCallback(), ticking])


def sft(folder, steps: int, ticking) -> Trainer:
    args = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": steps, "save_strategy": "no"}
    args = SFTConfig(str(folder), **args)
    model = LlamaForCausalLM(llama_config(num_hidden_layers=1))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = Dataset.from_list(ROWS)
    return ZeroSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[ticking])


def phases(trainer: Trainer) -> dict[str, float]:
    """Those that are not 0."""
    seconds = Metrics.read(Path(trainer.args.output_dir, FILE)).phase_seconds
    return {name: spent for name, spent in seconds.items() if spent}


@pytest.mark.parametrize("make", [plain, sft])
def test_trainings_of_one_process_each_count_their_own_phases(tmp_path, now, make):
    class Ticking(TrainerCallback):
        """A step takes ten seconds."""

        def on_step_end(self, *arguments, **keywords):
            now[0] += 10

    first = make(tmp_path / "first", 2, Ticking())
    second = make(tmp_path / "second", 3, Ticking())
    first.train()
    now[0] += 1000
    second.train()
    assert phases(first) == {"train": 20}
    assert phases(second) == {"train": 30}
    second.train()
    assert phases(second) == {"train": 30}, "a second training of the same trainer"


def test_a_run_of_a_recipe_counts_what_came_before_its_clock(now):
    for before, wanted in ((5.0, {"startup": 7, "train": 7}), (0.0, {"startup": 2, "train": 7})):
        clock = PhaseClock(before)
        now[0] += 2
        with clock.phase("train"):
            now[0] += 7
        assert {name: spent for name, spent in clock.seconds.items() if spent} == wanted
        now[0] += 100
