"""Samples lose nothing that was trained, and the reference loss is the loss that training sees."""

import json

import pytest

from tests.helpers import cases, ending_cases
from tests.helpers.bad_data import CHATML
from tests.helpers.ending_cases import strict
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, arguments, write_recipe
from zero_recipes.tools.verify import verify


def rows_of(folder):
    return [strict(line) for line in (folder / "samples.jsonl").read_text().split("\n") if line]


def one_row(folder, row):
    """A data folder whose test split is this row."""
    folder.mkdir()
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


FP32 = {"bf16": False, "random_weights": False, "dataset_format": None, "max_steps": 2, "eval_strategy": "steps"}
FP32 |= {"eval_steps": 2, "eval_on_start": True, "sample_prompts": 1, "sample_max_new_tokens": 1}
STORY = {"prompt": "Once upon a time there was a fox.", "completion": "She had a red hat and a big dog."}
CHAT = {"messages": [{"role": "user", "content": "The fox?"}, {"role": "assistant", "content": "It has a red hat."}]}


@pytest.mark.parametrize("row, keys", [(STORY, {"max_length": 27}), (CHAT, {"assistant_only_loss": True})])
def test_the_reference_loss_of_a_row_is_its_evaluation_loss_before_and_after_training(one, tmp_path, row, keys):
    """Of a row that is cut, and of a chat."""
    if row is CHAT:
        (tmp_path / "chat.jinja").write_text(CHATML)
        keys = keys | {"chat_template_path": str(tmp_path / "chat.jinja")}
    keys = FP32 | {"dataset_name": str(one_row(tmp_path / "one", row))} | keys
    path = write_recipe(tmp_path, **keys, model_name_or_path=str(ROOT / "tiny_world" / "base"))
    metrics = one.run(cases.train, argv=[str(path), "--output_dir", str(tmp_path / "out")])[0]["metrics"]
    (sample,) = rows_of(tmp_path / "out")
    evaluated = [evaluation["loss"] for evaluation in metrics["eval_history"]]
    scored = [sample[key]["reference_loss"] for key in ("scores_before", "scores_after")]
    assert scored == pytest.approx(evaluated, rel=1e-6) and scored[1] < scored[0]


def test_a_prompt_as_long_as_max_length_and_an_empty_reference_end_well(two, tmp_path):
    """A row without a score is a row that says so; samples come from the test split without an evaluation too."""
    keys = {"sample_prompts": 5, "sample_max_new_tokens": 2, "per_device_eval_batch_size": 2, "max_length": 80}
    path = write_recipe(tmp_path, save_model=True, max_steps=1, **keys)
    rows = [{"instruction": f"Say [/INST] {'very ' * n}much.", "input": "", "output": "x"} for n in (0, 1, 9, 40, 400)]
    rows[1]["output"] = ""
    test = tmp_path / "rows" / "test.jsonl"
    test.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    found = two.run(ending_cases.ending, argv=arguments(path, "zero3", out))
    assert [rank["error"] for rank in found] == [None, None] and found[0]["metrics"]["status"] == "ok"
    samples = rows_of(out)
    scores = [row["scores_after"]["reference_loss"] for row in samples]
    assert [score is None for score in scores] == [False, False, False, True, True]
    assert verify(out, deep=True)["tensors"] > 0
    printed = two.log(0, 10**6)
    assert "Before and after (5 of 5 prompts, from the split 'test')" in printed and "[/INST]" in printed
    assert "1 are longer than the model's limit; only their last 254 tokens" in printed  # 256 places, 2 for the answer


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("fsdp2"), "zero3"])
def test_samples_that_fail_lose_no_model(two, trained, tmp_path, strategy):
    """Whatever breaks after the save: exit with an error that names the whole model, and the model is the trained one.

    They are asked with the engine that has saved: unequal prompts on two ranks, and each forward pass is collective.
    """
    whole, out = trained(strategy), tmp_path / "out"
    assert len(rows_of(whole.folder)) == 3
    ranks = two.run(ending_cases.break_at, argv=arguments(whole.recipe, strategy, out), point="samples")
    metrics = ranks[0]["metrics"]
    assert ranks[0]["error"] == ["RuntimeError", "it broke"]
    assert (metrics["status"], metrics["failure"]["phase"]) == ("failed", "eval")
    assert metrics["error"] == f"RuntimeError: it broke (the model in {out} is saved and complete)"
    assert metrics["loss_history"] == whole.metrics["loss_history"]
    assert verify(out, deep=True) == verify(whole.folder, deep=True)
    # behind a traceback in the log, who reads it learns that nothing is lost: once, of rank 0
    line = f"the run failed (eval); the model in {out} is saved and complete\n"
    assert [two.log(rank, 10**6).count(line) for rank in range(2)] == [1, 0]
