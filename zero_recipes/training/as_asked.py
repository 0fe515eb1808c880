"""The optimizer that steps is the one that was asked for, with the learning rates that were asked for.

The one that was asked for is what transformers builds from the recipe, before accelerate and DeepSpeed wrap it or put
another in its place; under an optimizer block of a ds_config it is what the block says.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from zero_recipes.core.run_end import RunFailed
from zero_recipes.engine import optimizers
from zero_recipes.engine.optimizers import OptimizerFacts, are_equal

WATCHED_STEPS = 3  # whose learning rates are compared
SHOWN = 5  # differences in a message
SCHEDULED = ("lr", "betas", "momentum")  # by some schedules
# What may step in another's place: the same update by another program.
SAME_UPDATE = {
    "torch.AdamW": {"deepspeed.DeepSpeedCPUAdam", "deepspeed.ZenFlowCPUAdam"},
    "torch.Adam": {"deepspeed.DeepSpeedCPUAdam", "deepspeed.ZenFlowCPUAdam"},
    "torch.Adagrad": {"deepspeed.DeepSpeedCPUAdagrad"},
}
# What DeepSpeed makes of an optimizer block's type. Others of torch have their own names.
OF_BLOCK = {
    "adam": {"deepspeed.FusedAdam", "deepspeed.DeepSpeedCPUAdam", "torch.Adam", "torch.AdamW"},
    "adagrad": {"torch.Adagrad", "deepspeed.DeepSpeedCPUAdagrad"},
    "lion": {"deepspeed.FusedLion", "deepspeed.DeepSpeedCPULion"},
    "lamb": {"deepspeed.FusedLamb"},
}
OF_BLOCK["adamw"] = OF_BLOCK["adam"]


class NotAsAsked(RunFailed):
    """A run would train with another optimizer, or with other learning rates, than its recipe says."""


def refuse(differences: list[str]) -> None:
    """Raise NotAsAsked with these differences; nothing where there are none."""
    if not differences:
        return
    shown = differences[:SHOWN]
    if len(differences) > SHOWN:
        shown.append(f"and {len(differences) - SHOWN} more")
    lines = "\n    ".join(shown)
    raise NotAsAsked(
        "the run trains otherwise than the recipe says.\n"
        f"    {lines}\n"
        "    A library has put something else in its place. Use another strategy, another optim, or another optimizer "
        "or scheduler of the ds_config."
    )


def optimizer_differences(asked: OptimizerFacts, built: OptimizerFacts, trained: set[str]) -> list[str]:
    """Say where the optimizer that was built is not the one that was asked for, in words with both values.

    `trained`: names of the parameters that have gradients.
    """
    found = []
    if built.kind != asked.kind and built.kind not in SAME_UPDATE.get(asked.kind, ()):
        found.append(f"optimizer: {asked.kind} asked for, {built.kind} built")
    if asked.is_decoupled is not None and built.is_decoupled not in (None, asked.is_decoupled):
        words = {True: "decoupled, as in AdamW", False: "added to the gradient, as in Adam with L2"}
        found.append(f"weight decay: {words[asked.is_decoupled]}, asked for; {words[built.is_decoupled]}, built")
    if asked.settings:  # an optimizer that steps within the backward pass has none
        found += _group_differences(asked, built, trained)
    return found


def _group_differences(asked: OptimizerFacts, built: OptimizerFacts, trained: set[str]) -> list[str]:
    of_parameters: dict[tuple, list[str]] = {}  # {(key, asked, built): parameters}
    for name in sorted(trained & asked.settings.keys() & built.settings.keys()):
        wanted = asked.settings[name]
        got = built.settings[name]
        for key in wanted.keys() & got.keys():
            if not are_equal(wanted[key], got[key]):
                of_parameters.setdefault((key, str(wanted[key]), str(got[key])), []).append(name)
    found = []
    for (key, wanted, got), names in of_parameters.items():
        found.append(f"{key} of {_named(names)}: {wanted} asked for, {got} built")
    left_out = sorted(trained - built.settings.keys())
    if left_out:
        found.append(f"in no group of the optimizer: {_named(left_out)}")
    if built.repeated:
        found.append(f"in two groups of the optimizer: {_named(built.repeated)}")
    return found


def _named(names) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def block_differences(block: Mapping[str, Any], built: OptimizerFacts, trained: set[str]) -> list[str]:
    """Say where the optimizer that was built is not what an optimizer block of a ds_config asks for.

    `block`: with "auto" filled in; all parameters have its settings. `trained`: names of what has gradients.
    """
    kind = str(block["type"])
    parameters = dict(block.get("params") or {})
    is_adam = kind.lower() in ("adam", "adamw")
    decouples = None
    if is_adam:
        decouples = kind.lower() == "adamw" or bool(parameters.get("adam_w_mode", True))
    possible = OF_BLOCK.get(kind.lower(), {f"torch.{kind}"})
    is_own = kind.lower() in ("muon", "muadam", "muadamw", "musgd")  # rates of their own, by other keys
    asked_kind = built.kind if is_own or built.kind in possible else f"torch.{kind}"
    settings = {}
    if not is_own:
        wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
        settings = dict.fromkeys(trained, wanted)
    asked = OptimizerFacts(asked_kind, decouples, settings)
    return optimizer_differences(asked, built, trained)


class OptimizerProof:
    """Holds the optimizer and its learning rates against what was asked for, before and in the first steps.

    Every rank looks for itself and comes to the same: no collective.
    """

    def __init__(self) -> None:
        self.asked: OptimizerFacts | None = None  # None under an optimizer block
        self._first_rates: dict[str, float] = {}  # {parameter: the learning rate that the schedule is applied to}
        self._factor: Callable[[int], float] | None = None  # of a step; None of a schedule that is no factor
        self._begun_at = 0  # the schedule's step at the beginning: not 0 in a resumed run
        self._watched = 0  # steps with an effect
        self._last_step: int | None = None

    def ask(self, optimizer: Any, model: torch.nn.Module) -> None:
        """Take note of the optimizer that is asked for: `optimizer`, as transformers has made it."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self.asked = optimizers.optimizer_facts(optimizer, model)

    def hold(
        self,
        optimizer: Any,
        model: torch.nn.Module,
        block: Mapping[str, Any] | None,
        schedule: Any,
        args: TrainingArguments,
        steps: int,
    ) -> None:
        """Compare the optimizer that will step with the one that was asked for, and take note of its schedule.

        Args:
            optimizer: the one that will step.
            model: whose parameters are in it.
            block: the ds_config's optimizer, "auto" filled in; None without.
            schedule: the one in force, fresh or loaded from a checkpoint.
            args: ask for the schedule.
            steps: of the whole run.

        Raises:
            NotAsAsked: where a library has put something else in its place.
        """
        trained = optimizers.trained_names(model)
        built = optimizers.optimizer_facts(optimizer, model)
        rates_of = built
        if block is None and self.asked is not None:
            rates_of = self.asked
        self._first_rates = {name: settings["lr"] for name, settings in rates_of.settings.items()}
        schedule = _unwrapped(schedule)
        has_factor = isinstance(schedule, LambdaLR)
        if not has_factor:
            built = _without_scheduled(built)
        if block is not None:
            refuse(block_differences(block, built, trained))
        elif self.asked is not None:
            refuse(optimizer_differences(self.asked, built, trained))
        self._watched = 0
        self._last_step = None
        self._begun_at = getattr(schedule, "last_epoch", 0) or 0
        self._factor = _plain_factor(args, steps) if has_factor else None

    def hold_rates(self, optimizer: Any, model: torch.nn.Module, step: int, was_skipped: bool) -> None:
        """Compare the learning rates of the next step, after one of the first. Raises NotAsAsked.

        `step`: the one that has ended. `was_skipped`: it had no effect (fp16), and the schedule stands still.
        """
        if self._watched >= WATCHED_STEPS or was_skipped or step == self._last_step:
            return
        self._watched += 1
        self._last_step = step
        now = optimizers.current_rates(optimizer, model)
        known = [name for name in now if self._first_rates.get(name) is not None]
        if self._factor is None:
            refuse(_ratio_differences({name: self._first_rates[name] for name in known}, now))
            return
        place = self._begun_at + self._watched
        factor = self._factor(place)
        wrong: dict[tuple[float, float], list[str]] = {}
        for name in known:
            wanted = self._first_rates[name] * factor
            if not are_equal(wanted, now[name]):
                wrong.setdefault((wanted, now[name]), []).append(name)
        refuse(
            [
                f"learning rate of {_named(names)} after step {place}: {wanted:.6g} asked for, {got:.6g} set"
                for (wanted, got), names in wrong.items()
            ]
        )


def _ratio_differences(first: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """A schedule of any form must keep the ratios of the learning rates that were asked for (LoRA+)."""
    highest = max(first, key=first.__getitem__, default=None)
    if highest is None or not now[highest]:
        return []
    found = {}
    for name, rate in first.items():
        wanted = now[highest] * rate / first[highest]
        if not are_equal(wanted, now[name]):
            found[rate] = (
                f"learning rate of {name}: {wanted:.6g} asked for beside {now[highest]:.6g}, {now[name]:.6g} set"
            )
    return list(found.values())


def _unwrapped(schedule: Any) -> Any:
    """The schedule within accelerate's wrapper for one that DeepSpeed's engine steps."""
    return getattr(schedule, "scheduler", schedule)


def _without_scheduled(facts: OptimizerFacts) -> OptimizerFacts:
    """Without what a schedule of DeepSpeed's has changed by now: OneCycle also moves Adam's betas."""
    settings = {}
    for name, group in facts.settings.items():
        settings[name] = {key: value for key, value in group.items() if key not in SCHEDULED}
    return OptimizerFacts(facts.kind, facts.is_decoupled, settings, facts.repeated)


def _plain_factor(args: TrainingArguments, steps: int) -> Callable[[int], float]:
    """step -> what the learning rate is multiplied with, by transformers' schedule alone."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    plain = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
    )
    return plain.lr_lambdas[0]
