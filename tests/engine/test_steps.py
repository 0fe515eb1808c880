"""What a step computes, scores and logs: as docs/bare_loop.py, as without supervised_logits_only, as TRL."""

import pytest
from safetensors.torch import load_file

from tests.helpers import cases, step_cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, named, write_recipe, write_rows

STEPS = 4
QUICK = ["--eval_strategy", "no", "--sample_prompts", "null", "--save_model", "false", "--max_steps", str(STEPS)]
QUICK += ["--ignore", "ZR174"]  # fewer steps than the recipe's warm-up


# In fp32 only the order of sums differs. In bf16 another rounding of a gradient that is nearly zero changes the sign of
# Adam's first step there: the gap is bf16's, and grows with the steps as it does between the stages themselves.
@pytest.mark.parametrize("bf16, apart, stage", [grid(False, 1e-6, 0), (False, 1e-6, 2), grid(True, 5e-3, 3)])
def test_the_bare_loop_has_the_losses_of_run_sft(two, tmp_path, stage, bf16, apart):
    argv = ["recipes/tiny.yaml", "--deepspeed", f"ds_configs/zero{stage}.json", "--output_dir", str(tmp_path), *QUICK]
    ours = two.run(cases.train, argv=[*argv, "--bf16", str(bf16).lower()])[0]["metrics"]["loss_history"]
    bare = two.run(step_cases.bare_loop, stage=stage, steps=STEPS, bf16=bf16)[0]
    assert bare == pytest.approx(ours, rel=apart)
    assert bare[:2] == pytest.approx(ours[:2], rel=1e-6), "the first rate is 0: two steps of the same weights"
    assert ours[-1] < ours[0]


# supervised_logits_only: on CPUs too, the LM head scores the positions that have a loss, and no others


@pytest.mark.parametrize(
    "strategy, packing",
    [("zero2", True), grid("zero3", False), grid("ddp", True), grid("fsdp2", False), grid("zero0", True)],
)
def test_no_prompt_is_scored_and_the_run_trains_the_same(two, tmp_path, strategy, packing):
    keys = {"bf16": False, "max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    path = write_recipe(tmp_path, packing=packing, **keys)
    found = {}
    for only in (True, False):  # the last run must score all again: the switch is for a run, not for the process
        argv = [str(path), "--output_dir", str(tmp_path / str(only)), "--supervised_logits_only", str(only).lower()]
        ranks = two.run(step_cases.train_scored, argv=[*argv, *named(strategy)])
        for rank in ranks:
            # where TRL itself leaves prompts out on CPUs, speed/supervised_positions.py must go
            assert rank["scored"] == (rank["supervised"] if only else rank["positions"])
            assert 0 < sum(rank["supervised"]) < 0.9 * sum(rank["positions"])
        found[only] = ranks[0]["metrics"]
    for key in ("loss_history", "grad_norm_history"):
        assert found[True][key] == pytest.approx(found[False][key], rel=1e-5), key


# the log of a run is TRL's

# times, and what is counted otherwise here: no token of a repeated row, means over an evaluation's tokens
OURS = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "tokens_per_second", "num_tokens"}
OURS |= {"peak_memory_bytes", "communication_bytes_per_step"}
OURS |= {"eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens"}


@pytest.mark.parametrize(
    "strategy, keys",
    [
        ("ddp", {}),
        grid("zero2", {"bf16": False, "max_grad_norm": 1.0}),
        grid("zero3", {}),
        grid("zero2", {"loss_type": "dft"}),  # TRL's own compute_loss, as for any loss but cross-entropy
        grid("ddp", {"label_smoothing_factor": 0.1}),  # a rank's last batch is all repeated rows: no token counts
        grid("fsdp2", {}),
    ],
)
def test_the_log_is_that_of_trls_own_compute_loss(two, tmp_path, strategy, keys):
    """And losses and gradient norms are the same bit for bit; over the end of an epoch, evaluations between logs."""
    rows = write_rows(tmp_path / "few", count=6 * 7 + 4)
    path = write_recipe(
        tmp_path, dataset_name=str(rows), per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=8,
        logging_steps=3, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=20, **keys,
    )  # fmt: skip
    found = {}
    for when, most_kept in (("micro_batch", None), ("logging_steps", None), ("logging_steps", 4)):
        argv = [str(path), "--output_dir", str(tmp_path / f"{when}{most_kept}"), "--token_metrics", when]
        argv += named(strategy)
        found[when, most_kept] = two.run(step_cases.log_of, argv=argv, most_kept=most_kept)
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
    by_trl = not keys.keys().isdisjoint({"loss_type", "label_smoothing_factor"})
    assert counted[1] == counted[2] and (counted[0] == counted[1]) == by_trl, "without repeated rows"


@pytest.mark.parametrize("strategy", [*map(grid, ("ddp", "zero2", "zero3_offload", "fsdp2")), "zero3"])
def test_loraplus_has_a_learning_rate_for_each_kind_of_tensor(two, tmp_path, strategy):
    """Adam's second step moves the farthest number by 0.74 (no gradient in the first) to 1 of its learning rate."""
    keys = {"use_peft": True, "lora_target_modules": ["dense", "embed_in"], "lora_dropout": 0.0, "max_steps": 2}
    keys |= {"lora_modules_to_save": ["final_layer_norm", "dense_4h_to_h"], "loraplus_lr_ratio": 16.0, "bf16": False}
    keys |= {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    two.run(cases.train, argv=arguments(write_recipe(tmp_path, **keys), strategy, tmp_path / "out"))
    files = [tmp_path / "out" / f"checkpoint-{step}" / "adapter_model.safetensors" for step in (1, 2)]
    first, second = map(load_file, files)
    rates = {"lora_A": 1e-3, "lora_B": 16e-3, "embedding_A": 1e-6, "embedding_B": 1e-6, "norm.": 16e-3}
    rates |= {"4h_to_h.weight": 1e-3, "4h_to_h.bias": 16e-3}
    for kind, rate in rates.items():
        moved = max((second[name] - first[name]).abs().max().item() for name in first if kind in name)
        assert moved == pytest.approx(0.87 * rate, rel=0.2), kind
