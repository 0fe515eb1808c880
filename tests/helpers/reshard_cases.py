"""What the workers of tests/helpers/group.py run for test_reshard.py: states before saving and after loading."""

import json

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import run_sft
from tests.helpers.around import before
from tests.helpers.cases import train
from zero_recipes.engine.deepspeed import base_optimizer, flat_masters
from zero_recipes.metrics.callback import StageMetricsCallback


def train_and_keep_states(argv: list[str], step: int, path: str) -> dict:
    """`train`; what DeepSpeed itself gathers of masters and Adam's states when `step` is saved goes to `path`."""

    def keep(self, args, state, control, model=None, optimizer=None, **_) -> None:
        if state.global_step == step:
            states = gathered_states(model, optimizer)
            if args.process_index == 0:
                torch.save(states, path)

    with before(StageMetricsCallback, "on_save", keep):
        return train(argv)


def train_and_compare_states(argv: list[str], path: str) -> dict:
    """`train` from a resharded checkpoint; how the states after loading, before any step, differ from those at `path`.

    "different": names whose masters, moments or weights for the forward pass are not the same bits.
    "dtypes": of masters and moments.
    "steps": Adam's counters before and after the run; "counters": how many tensors they are, "groups": of how many.
    """
    seen = {}

    def counters(optimizer) -> list:
        return [state["step"] for state in base_optimizer(optimizer).state.values()]

    def compare(*_, model=None, optimizer=None, **__) -> None:
        wanted, found = torch.load(path), gathered_states(model, optimizer)
        assert wanted.keys() == found.keys() and wanted
        seen["different"] = sorted(
            f"{name} {key}"
            for name in wanted
            for key in wanted[name]
            if wanted[name][key].dtype != found[name][key].dtype or not wanted[name][key].equal(found[name][key])
        )
        seen["steps"] = [{int(step) for step in counters(optimizer)}.pop()]

    with before(StageMetricsCallback, "on_train_begin", compare):
        run = run_sft.read_run(argv)
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
    steps = counters(trainer.optimizer)
    assert len({int(step) for step in steps}) == 1
    shared = {step.data_ptr() if torch.is_tensor(step) else number for number, step in enumerate(steps)}
    return {
        "different": seen["different"],
        "steps": [*seen["steps"], int(steps[0])],
        "counters": len(shared),
        "groups": len(trainer.optimizer.param_groups),
        "dtypes": state_dtypes(trainer.optimizer.optimizer),
        "losses": json.loads((run.output_dir / "metrics.json").read_text())["loss_history"],
    }


def gathered_states(model, optimizer) -> dict:
    """{name: {"fp32", "exp_avg", "exp_avg_sq", "weight"}} of what is trained, whole, gathered by DeepSpeed.

    States in bf16 come in fp32 from stages 1 and 2 and in bf16 from stage 3: all are given in fp32, exactly.
    """
    optimizer, states = optimizer.optimizer, {}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8, zero/stage_1_and_2.py `_optimizer_step` links all groups after the first one's step: the
        # moments of the others do not exist yet, and safe_get_full_optimizer_state does not find them
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in model.named_parameters():
        if p.requires_grad:
            states[name] = {"fp32": safe_get_full_fp32_param(p).float().clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                states[name][key] = safe_get_full_optimizer_state(p, key).float().clone()
            with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
                states[name]["weight"] = p.data.clone()
    return states


def state_dtypes(optimizer) -> list[str]:
    """Of masters and moments together, as this rank holds them."""
    moments = base_optimizer(optimizer).state.values()
    held = [state[key] for state in moments for key in ("exp_avg", "exp_avg_sq")]
    return sorted({str(tensor.dtype) for tensor in (*held, *flat_masters(optimizer))})
