"""The log of a run is TRL's."""

import random

import pytest

from tests.helpers.grid import grid
from tests.helpers.tiny import named, write_recipe, write_rows

# times, and what is counted otherwise here: no token of a repeated row, means over an evaluation's tokens
OURS = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "tokens_per_second", "num_tokens"}
OURS |= {"peak_memory_bytes", "communication_bytes_per_step"}
OURS |= {"eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens"}


@pytest.mark.parametrize(
    "strategy, keys",
    [
        grid("ddp", {}),
        grid("zero2", {"bf16": False, "max_grad_norm": 1.0}),
        ("zero3", {}),
        grid("zero2", {"loss_type": "dft"}),  # TRL's own compute_loss, as for any loss but cross-entropy
        grid("ddp", {"label_smoothing_factor": 0.1}),
        grid("fsdp2", {}),
    ],
)
def test_the_log_is_that_of_trls_own_compute_loss(two, tmp_path, strategy, keys):
    """And losses and gradient norms are the same bit for bit; over the end of an epoch, evaluations between logs."""
    draw = random.Random(f"{strategy}{keys}")
    rows = write_rows(tmp_path / "few", count=6 * draw.randint(5, 8) + draw.randint(2, 5), seed=draw.randint(0, 99))
    path = write_recipe(
        tmp_path, dataset_name=str(rows), per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=8,
        logging_steps=3, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=20, **keys,
    )  # fmt: skip
    found = {}
    for when, most_kept in (("micro_batch", None), ("logging_steps", None), ("logging_steps", 4)):
        argv = [str(path), "--output_dir", str(tmp_path / f"{when}{most_kept}"), "--token_metrics", when]
        argv += named(strategy)
        found[when, most_kept] = two.run("step_cases.log_of", argv=argv, most_kept=most_kept)
    trl = found.pop(("micro_batch", None))
    for ours in found.values():
        for rank, wanted in zip(ours, trl, strict=True):
            assert (rank["losses"], rank["norms"], rank["flos"]) == (wanted["losses"], wanted["norms"], wanted["flos"])
            for entry, other in zip(rank["log"], wanted["log"], strict=True):
                assert {*entry} == {*other} and ("entropy" in other or "eval_entropy" in other)
                kept = {key: value for key, value in other.items() if key not in OURS}
                assert {key: entry[key] for key in kept} == pytest.approx(kept, rel=1e-6)
    assert len(trl[0]["log"]) == 2 + 2
    counted = [max(entry.get("num_tokens", 0) for entry in logs[0]["log"]) for logs in (trl, *found.values())]
    assert counted[1] == counted[2] and (counted[0] == counted[1]) == ("loss_type" in keys), "without repeated rows"
