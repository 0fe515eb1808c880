"""Two processes that share each sequence train as one process does without: losses, weights, tokens, evaluations."""

from collections.abc import Callable

import pytest

from tests.helpers import cases, family_cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import named, weights_apart, write_llama, write_recipe, write_rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Rows of very uneven length, accumulation over them, clipping; more steps than an epoch has, which divides."""
    folder = tmp_path_factory.mktemp("ulysses")
    keys = {"random_weights": False, "bf16": False, "max_steps": 8, "gradient_accumulation_steps": 4}
    keys |= {"eval_strategy": "steps", "eval_steps": 4, "data_seed": 3, "save_model": True, "max_grad_norm": 1.0}
    keys |= {"per_device_eval_batch_size": 6}  # no evaluation row is dropped: on two processes 24 rows fill two rounds
    keys |= {"dataset_name": str(write_rows(folder / "few", count=48))}
    path = write_recipe(folder, pad_to_multiple_of=128, dataloader_drop_last=True, **keys)
    write_llama(folder / "model")
    return path


@pytest.fixture(scope="module")
def alone(one, recipe):
    """The metrics of one process, which sees whole sequences; its model is in the folder `alone` beside the recipe."""
    return run(one, recipe, recipe.parent / "alone")


def run(group, recipe, folder, *more: str, case: Callable = cases.train) -> dict:
    return group.run(case, argv=[str(recipe), "--output_dir", str(folder), *more])[0]["metrics"]


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_shared_sequences_train_as_whole_ones(two, recipe, alone, tmp_path, strategy):
    found, wanted = run(two, recipe, tmp_path / "out", *named(strategy), "--sequence_parallel_size", "2"), alone
    assert (found["strategy"], found["world_size"]) == (f"{strategy}_ulysses", 2)
    assert found["loss_history"] == pytest.approx(wanted["loss_history"], rel=1e-5)
    assert wanted["loss_history"][-1] < wanted["loss_history"][0] - 0.3
    assert weights_apart(tmp_path / "out", recipe.parent / "alone") < 1e-5
    losses = [[evaluation["loss"] for evaluation in metrics["eval_history"]] for metrics in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 2
    assert found["tokens"] == wanted["tokens"], "each token counts once, however many processes share its row"
    speeds = [metrics["tokens_per_second"] for metrics in (found, wanted)]
    mine, theirs = (speed["supervised"] / speed["all"] for speed in speeds)
    assert mine == pytest.approx(theirs)
    assert found["model_flops_per_token"] == pytest.approx(wanted["model_flops_per_token"]), "a row is looked at whole"
    assert found["communication_bytes_per_step"]["all_to_all"] > 0


@pytest.mark.grid
def test_two_groups_share_out_the_rows(four, recipe, alone, tmp_path):
    """Four processes, two sequences at a time: half the accumulation is the same step."""
    more = ["--sequence_parallel_size", "2", "--gradient_accumulation_steps", "2", *named("zero2")]
    found = run(four, recipe, tmp_path / "out", *more)
    assert found["loss_history"] == pytest.approx(alone["loss_history"], rel=1e-5)
    assert found["tokens"] == alone["tokens"]
    assert found["model_flops_per_token"] == pytest.approx(alone["model_flops_per_token"])


@pytest.mark.private
def test_a_mean_for_each_micro_batch_is_noticed(two, recipe, alone, tmp_path):
    """Fails when transformers weighs tokens under Ulysses: then loss_of_a_part may go."""
    more = [*named("zero2"), "--sequence_parallel_size", "2"]
    found = run(two, recipe, tmp_path / "out", *more, case=family_cases.train_with_a_mean_for_each_micro_batch)
    assert found["loss_history"] != pytest.approx(alone["loss_history"], rel=1e-3)
