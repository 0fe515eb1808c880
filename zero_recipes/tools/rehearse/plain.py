"""Plain torch, in one process, takes the steps of an observed run: no DeepSpeed, no FSDP, no Trainer.

The model is transformers' own with its own forward pass, the loss is cross-entropy over all tokens of a step, and the
optimizer is torch's. What the run's ranks have trained on comes from observed.py; everything else is computed anew.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import Trainer, get_scheduler

from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import WITHOUT_LAUNCH, trl_arguments
from zero_recipes.model.config import adapter_config, load_config
from zero_recipes.model.towers import auto_class, freeze_towers, spare_towers
from zero_recipes.tools.rehearse import observed

# How far apart fp32 sums in another order may come, as shares. Another optimizer, or gradients that are not summed over
# ranks, are thousands of times that.
LOSSES_APART = 1e-4
NORMS_APART = 1e-3
WEIGHTS_APART = 0.02  # of a tensor's whole movement
NO_GRADIENT = 1e-6  # of the largest: what is below is rounding, which Adam scales up to a whole step


@dataclass(frozen=True)
class Equal:
    """An observed run that is plain torch's, up to rounding."""

    steps: int
    losses_apart: float  # the largest difference, as a share
    trained: int  # tensors
    parameters: int  # in them

    def __str__(self) -> str:
        digits = f"{self.losses_apart:.0e}"
        return f"{self.steps} steps as plain torch's, losses {digits} apart; {self.parameters:,} parameters train"


class Difference(NamedTuple):
    """The first thing that the run and plain torch do not agree on."""

    what: str
    run: str
    plain: str


class Row(NamedTuple):
    """A row of a micro batch, without padding."""

    ids: torch.Tensor  # (tokens,)
    labels: torch.Tensor  # (tokens,), -100 without a loss


# what plain torch cannot say anything about


def not_comparable(settings: Settings, ds_config: Mapping[str, Any]) -> str | None:
    """Why the run is not equal to plain torch by its nature, in words; None where it should be."""
    zero = ds_config.get("zero_optimization") or {}
    optimizer = ds_config.get("optimizer") or {}
    scheduler = ds_config.get("scheduler") or {}
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(key)]
    kind = str(optimizer.get("type", "adamw")).lower()
    reasons = {
        f"{' and '.join(quantized)} round what is sent": bool(quantized),
        "ranks share each sequence (sequence_parallel_size)": settings.sequence_parallel_size > 1,
        "chat_template_path adds tokens, whose embeddings are random": settings.clones_tokenizer,
        f"loss_type: {settings.loss_type}": settings.loss_type not in (None, "nll"),
        "torch_autocast computes in 16 bits": bool((ds_config.get("torch_autocast") or {}).get("enabled")),
        f"torch has no optimizer {optimizer.get('type')}": kind not in ("adam", "adamw") and not _of_torch(optimizer),
        "OneCycle moves more than the learning rate": scheduler.get("type") == "OneCycle",
        f"the optimizer {settings.optimizer_name}": _has_own_steps(settings) and not optimizer,
    }
    return next((words for words, holds in reasons.items() if holds), None)


def _of_torch(optimizer: Mapping[str, Any]) -> bool:
    return hasattr(torch.optim, str(optimizer.get("type")))


def _has_own_steps(settings: Settings) -> bool:
    """Whether an optimizer is not a function of each parameter's gradient, or keeps rounded states."""
    named = settings.optimizer_name
    return any(word in named for word in ("galore", "apollo", "lomo", "adafactor", "8bit", "4bit", "schedule_free"))


# the comparison


def compare(folder: Path, settings: Settings, recipe: Path) -> Equal | Difference:
    """Hold an observed run against plain torch's steps from the same weights on the same rows.

    `folder`: the run's output_dir. `settings`: of the run, in fp32 and without dropout. `recipe`: its path.
    """
    kept = folder / observed.FOLDER
    facts = json.loads((kept / observed.FACTS).read_text())
    start = load_file(kept / observed.START)
    model = plain_model(settings)
    difference = _differs_at_the_start(model, start, facts["trained"])
    if difference is not None:
        return difference
    steps = rows_by_step([torch.load(kept / observed.batches_file(rank)) for rank in range(facts["ranks"])])
    stepper = Stepper(model, settings, recipe, facts["ds_config"], len(steps))
    losses_apart = 0.0
    for number, rows in enumerate(steps):
        rates = stepper.rates()
        loss, norm = stepper.step(rows)
        difference = _differs_in_a_step(number, loss, norm, rates, facts)
        if difference is not None:
            return difference
        losses_apart = max(losses_apart, _apart(facts["losses"][number], loss))
    difference = _differs_at_the_end(model, start, load_file(kept / observed.END), stepper.largest_gradients)
    if difference is not None:
        return difference
    trained = [p for p in model.parameters() if p.requires_grad]
    return Equal(len(steps), losses_apart, len(trained), sum(p.numel() for p in trained))


def plain_model(settings: Settings) -> torch.nn.Module:
    """The recipe's model by transformers and PEFT alone, in fp32, in training mode."""
    config = load_config(settings)
    model = auto_class(config).from_pretrained(
        settings.model_name_or_path,
        dtype=torch.float32,
        attn_implementation=settings.attn_implementation,
        trust_remote_code=settings.trust_remote_code,
    )
    model.config.use_cache = False
    freeze_towers(model)
    adapter = spare_towers(adapter_config(settings), model)
    if adapter is not None:
        import peft

        model = peft.get_peft_model(model, adapter)
    return model.train()


def rows_by_step(ranks: list[list[dict[str, Any]]]) -> list[list[Row]]:
    """The rows of each step, of all ranks and micro batches."""
    steps: dict[int, list[Row]] = {}
    for batches in ranks:
        for batch in batches:
            steps.setdefault(batch["step"], []).extend(rows_of(batch))
    return [steps[number] for number in sorted(steps)]


def rows_of(batch: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a micro batch: of padded lines, or of packs, where positions begin anew with each row."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    for line in range(len(ids)):
        if positions is not None:
            starts = (positions[line] == 0).nonzero().flatten().tolist()
            ends = [*starts[1:], len(ids[line])]
            for begin, end in zip(starts, ends, strict=True):
                yield Row(ids[line, begin:end], labels[line, begin:end])
        elif mask is not None and mask.dim() == 2:
            kept = mask[line].bool()
            yield Row(ids[line][kept], labels[line][kept])
        else:
            yield Row(ids[line], labels[line])


class Stepper:
    """A model, and torch's own optimizer and schedule for it as the recipe and its ds_config say."""

    def __init__(self, model, settings: Settings, recipe: Path, ds_config: Mapping[str, Any], steps: int):
        args = trl_arguments(settings.replace(**WITHOUT_LAUNCH), recipe).training
        self.model = model
        self.smoothing = settings.label_smoothing_factor
        self.limit = clipped_at(settings, ds_config)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.largest_gradients = {name: torch.zeros(p.shape) for name, p in self.trained.items()}
        self.optimizer = plain_optimizer(model, settings, args, ds_config)
        self.first_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.factor = plain_factor(settings, args, ds_config, steps)
        self.taken = 0
        self._set_rates()

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.first_rates, strict=True):
            group["lr"] = rate * self.factor(self.taken)

    def rates(self) -> dict[str, float]:
        """The learning rate of each parameter in the next step."""
        names = {id(p): name for name, p in self.trained.items()}
        rates = {}
        for group in self.optimizer.param_groups:
            rates |= {names[id(p)]: group["lr"] for p in group["params"]}
        return rates

    def step(self, rows: list[Row]) -> tuple[float, float]:
        """Take a step.

        Returns the mean loss of all tokens that have one, and the norm of its gradient before clipping.
        """
        tokens = sum(int((row.labels[1:] != -100).sum()) for row in rows)
        total = 0.0
        for row in rows:  # one after the other: nothing is padded, and no row can see another
            loss = self._summed_loss(row)
            if loss is not None:
                (loss / tokens).backward()
                total += float(loss.detach())
        for name, p in self.trained.items():
            if p.grad is not None:
                self.largest_gradients[name] = torch.maximum(self.largest_gradients[name], p.grad.abs())
        limit = self.limit or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        self._set_rates()
        return total / tokens, float(norm)

    def _summed_loss(self, row: Row) -> torch.Tensor | None:
        """None where no token of the row has a loss."""
        targets = row.labels[1:]
        has_loss = targets != -100
        if not has_loss.any():
            return None
        logits = self.model(input_ids=row.ids[None]).logits[0, :-1]
        log_probabilities = log_softmax(logits[has_loss].float(), dim=-1)
        of_targets = -log_probabilities.gather(-1, targets[has_loss][:, None]).sum()
        if not self.smoothing:
            return of_targets
        of_all = -log_probabilities.mean(-1).sum()
        return (1 - self.smoothing) * of_targets + self.smoothing * of_all


def clipped_at(settings: Settings, ds_config: Mapping[str, Any]) -> float:
    """The norm that gradients are clipped at; 0 for none."""
    limit = ds_config.get("gradient_clipping", "auto")
    return settings.max_grad_norm if limit == "auto" else limit


def plain_optimizer(model, settings: Settings, args, ds_config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make torch's optimizer for the recipe's `optim`, or for a ds_config's optimizer block."""
    block = ds_config.get("optimizer")
    if block is not None:
        return _optimizer_of_block(model, settings, args, block)
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if settings.loraplus_lr_ratio is not None:
        from peft.optimizers import create_loraplus_optimizer

        keywords |= {"loraplus_lr_ratio": settings.loraplus_lr_ratio, "loraplus_weight_decay": args.weight_decay}
        return create_loraplus_optimizer(model, kind, **keywords)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    with_decay = [p for name, p in model.named_parameters() if p.requires_grad and name in decayed]
    without = [p for name, p in model.named_parameters() if p.requires_grad and name not in decayed]
    groups = [{"params": with_decay, "weight_decay": args.weight_decay}, {"params": without, "weight_decay": 0.0}]
    return kind(groups, **keywords)


def _optimizer_of_block(model, settings: Settings, args, block: Mapping[str, Any]) -> torch.optim.Optimizer:
    """DeepSpeed decays every parameter then. transformers fills "auto" in."""
    from_recipe = {
        "lr": settings.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    parameters = {}
    for key, value in (block.get("params") or {}).items():
        parameters[key] = from_recipe[key] if value == "auto" else value
    kind = str(block["type"])
    for of_deepspeed in ("torch_adam", "fp32_optimizer_states"):
        parameters.pop(of_deepspeed, None)
    is_decoupled = parameters.pop("adam_w_mode", True) or kind.lower() == "adamw"
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind.lower() in ("adam", "adamw"):
        cls = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return cls(trained, **{"weight_decay": 0.0} | parameters)  # DeepSpeed's default; AdamW's is 0.01
    return getattr(torch.optim, kind)(trained, **parameters)


def plain_factor(settings: Settings, args, ds_config: Mapping[str, Any], steps: int) -> Callable[[int], float]:
    """Make the schedule: a function from a step to what the learning rate is multiplied with."""
    rate = settings.learning_rate
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    warmup = args.get_warmup_steps(steps)
    block = ds_config.get("scheduler")
    if block is None:
        keywords = dict(settings.lr_scheduler_kwargs or {})
        plain = get_scheduler(settings.lr_scheduler_type, optimizer, warmup, steps, keywords)
        return getattr(plain, "lr_lambdas", [lambda _: 1.0])[0]  # by the loss: it has none in a few steps
    from deepspeed.runtime import lr_schedules

    from_recipe = {"warmup_max_lr": rate, "warmup_min_lr": 0.0, "total_num_steps": steps}
    from_recipe["warmup_num_steps"] = max(1, warmup)  # DeepSpeed takes no 0, for which transformers writes 1
    parameters = {}
    for key, value in (block.get("params") or {}).items():
        parameters[key] = from_recipe[key] if value == "auto" else value
    schedule = getattr(lr_schedules, block["type"])(optimizer, **parameters)
    factors = []
    for _ in range(steps + 1):
        factors.append(optimizer.param_groups[0]["lr"] / rate)
        schedule.step()
    return factors.__getitem__


# differences


def _apart(run: float, plain: float) -> float:
    """The difference as a share of the plain value; infinite where one of them is not finite."""
    if not (math.isfinite(run) and math.isfinite(plain)):
        return 0.0 if run == plain else math.inf
    return abs(run - plain) / max(abs(plain), 1e-12)


def _differs_at_the_start(model, start: Mapping[str, torch.Tensor], trained: list[str]) -> Difference | None:
    """Whether other parameters train, or begin elsewhere. A new adapter's values become plain torch's."""
    mine = {name: p for name, p in model.named_parameters()}
    my_trained = {name for name, p in mine.items() if p.requires_grad}
    for name in sorted(my_trained ^ set(trained)):
        states = {True: "trains", False: "is frozen, or not there"}
        return Difference(f"the parameter {name}", states[name in trained], states[name in my_trained])
    for name, parameter in mine.items():
        value = start.get(name)
        if value is None or value.shape != parameter.shape:
            shape = "nothing" if value is None else str(tuple(value.shape))
            return Difference(f"the shape of {name}", shape, str(tuple(parameter.shape)))
        is_new = "lora_" in name or ".default" in name
        if not is_new and not torch.equal(value, parameter.detach()):
            gap = (value - parameter.detach()).abs().max()
            return Difference(f"the weights {name} before the first step", f"{gap:.3g} away", "as loaded")
        with torch.no_grad():
            parameter.copy_(value)
    return None


def _differs_in_a_step(number: int, loss: float, norm: float, rates: Mapping[str, float], facts) -> Difference | None:
    for name, plain in rates.items():
        run = facts["rates"][number].get(name)
        if run is None or _apart(run, plain) > 1e-6:
            return Difference(f"the learning rate of {name} in step {number + 1}", f"{run}", f"{plain:.9g}")
    run = facts["losses"][number]
    if _apart(run, loss) > LOSSES_APART:
        return Difference(f"the loss of step {number + 1}", f"{run:.6f}", f"{loss:.6f}")
    if facts["norms"]:  # stage 0 keeps none in fp32
        run = facts["norms"][number]
        if _apart(run, norm) > NORMS_APART:
            return Difference(f"the gradient norm of step {number + 1}", f"{run:.6f}", f"{norm:.6f}")
    return None


def _differs_at_the_end(model, start, end: Mapping[str, torch.Tensor], gradients) -> Difference | None:
    """Compare how far each tensor has moved, where it has a gradient beyond rounding."""
    largest = max((float(gradient.max()) for gradient in gradients.values()), default=0.0)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = gradients[name]
        is_rounding = (gradient > 0) & (gradient < max(NO_GRADIENT * largest, 1e-3 * float(gradient.max())))
        plain = (parameter.detach() - start[name]).masked_fill(is_rounding, 0.0)
        run = (end[name] - start[name]).masked_fill(is_rounding, 0.0)
        moved = float(plain.norm())
        gap = float((run - plain).norm())
        rounding = 3e-7 * float(start[name].norm())
        if gap > WEIGHTS_APART * moved + rounding:
            what = f"the weights {name} after the last step"
            return Difference(what, f"moved by {float(run.norm()):.6g}", f"by {moved:.6g}, {gap:.3g} elsewhere")
    return None
