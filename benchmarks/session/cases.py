"""What an hour on one GPU runs, part by part, the most informative first: a short hour leaves out the last of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

LENGTH = 512  # tokens of every row
STAGES = ("zero0", "zero1", "zero2", "zero3")
CHECKPOINTING = {"activation_checkpointing": True}
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "learning_rate": 2.0e-4}
PARTS = {
    1: "the tiny recipe: single, stages 2 and 3, samples and save",
    2: "plans made beforehand against measured peaks",
    3: "throughput, MFU, the callback on and off, one profiler trace",
    4: "CPU offload and ZeRO-Infinity",
    5: "the quantizer kernels against the stand-in of the tests",
    6: "fp16 and its loss scaling",
    7: "tokens per second and MFU beside `trl sft` with its defaults and a bare loop",
}


@dataclass(frozen=True)
class Case:
    """One run. `model`: "tiny", a shape of zero_recipes/plan/models/, or a shipped recipe ("recipes/...")."""

    part: int
    name: str
    model: str
    strategy: str  # a file of accelerate_configs/, or "single"
    keys: dict[str, Any] = field(default_factory=dict)  # laid over the recipe
    seconds: int = 60  # what it is expected to take; it is ended after three times as much
    options: tuple[str, ...] = ()  # of benchmarks/session/run.py

    @property
    def slug(self) -> str:
        return f"{self.part}-" + re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")

    @property
    def saves(self) -> bool:
        return bool(self.keys.get("save_model"))


def cases(part: int) -> list[Case]:
    """The runs of a part; part 5 trains nothing and has none."""
    return {1: _tiny, 2: _plans, 3: _speed, 4: _offload, 5: list, 6: _fp16, 7: _side_by_side}[part]()


def rehearsed(part: int) -> list[Case]:
    """Those that differ where every shape has two layers; what is compiled for minutes comes last."""
    shape = re.compile(r"^(pythia|llama)-[\d.]+b?m?$")
    distinct = {}
    for case in cases(part):
        model = "shape" if shape.match(case.model) else case.model
        distinct.setdefault((model, case.strategy, str(case.keys), case.options), case)
    return sorted(distinct.values(), key=lambda case: case.strategy.endswith("_infinity"))


def _tiny() -> list[Case]:
    keys = {"max_steps": 60, "eval_steps": 30, "sample_prompts": 20, "save_model": True}
    return [Case(1, f"tiny {name}", "tiny", name, keys, 60) for name in ("single", "zero2", "zero3")]


def _plans() -> list[Case]:
    def case(size: str, strategy: str, words: str = "", **keys: Any) -> Case:
        seconds = {"410m": 30, "1.4b": 50, "2.8b": 80}[size]
        return Case(2, f"pythia-{size} {strategy} {words}".strip(), f"pythia-{size}", strategy, keys, seconds)

    small = [case("410m", name) for name in ("single", *STAGES)]
    small += [case("410m", name, "checkpointing", **CHECKPOINTING) for name in ("single", *STAGES)]
    others = [
        case("410m", "zero2", "lora", **LORA),
        case("410m", "zero3", "lora", **LORA),
        case("410m", "zero2_offload"),
        case("410m", "zero3_offload"),
        case("410m", "zero2", "micro batch 16", per_device_train_batch_size=16),
    ]
    middle = [case("1.4b", name) for name in STAGES]
    middle += [case("1.4b", name, "checkpointing", **CHECKPOINTING) for name in ("zero2", "zero3")]
    large = [case("2.8b", name) for name in STAGES]
    large += [case("2.8b", name, "checkpointing", **CHECKPOINTING) for name in ("zero2", "zero3")]
    last = [case("2.8b", "zero3", "lora", **LORA), case("1.4b", "zero2_offload"), case("2.8b", "zero3_offload")]
    first = [small[0], small[3], small[4], middle[2], middle[3], large[2], large[3], *others]
    rest = [one for one in (*small, *middle, *large, *last) if one not in first]
    return [*first, *rest]


def _speed() -> list[Case]:
    steps = {"max_steps": 20}
    small, large = "recipes/pythia-410m.yaml", "recipes/pythia-2.8b.yaml"
    wide = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, **steps}
    half = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, **steps}
    return [
        Case(3, "pythia-410m single", small, "single", steps, 40),
        Case(3, "pythia-410m zero2", small, "zero2", steps, 40),
        Case(3, "pythia-410m zero2, without the callback", small, "zero2", steps, 40, ("--without_metrics",)),
        Case(3, "pythia-410m zero2, profiled", small, "zero2", {"max_steps": 8}, 60, ("--profile",)),
        Case(3, "pythia-2.8b zero2", large, "zero2", steps, 90),
        Case(3, "pythia-410m zero2, micro batch 32", small, "zero2", wide, 45),
        Case(3, "pythia-2.8b zero2, micro batch 16", large, "zero2", half, 90),
        Case(3, "pythia-2.8b zero3", large, "zero3", steps, 90),
        Case(3, "pythia-lora zero2", "recipes/pythia-lora.yaml", "zero2", steps, 150),
    ]


def _offload() -> list[Case]:
    steps = {"max_steps": 6, **CHECKPOINTING}
    return [
        Case(4, "pythia-410m zero3_infinity", "pythia-410m", "zero3_infinity", steps, 150),  # compiles async_io
        Case(4, "pythia-2.8b zero2_offload", "pythia-2.8b", "zero2_offload", steps, 110),
        Case(4, "pythia-2.8b zero3_infinity", "pythia-2.8b", "zero3_infinity", steps, 150),
        Case(4, "pythia-2.8b zero3_offload", "pythia-2.8b", "zero3_offload", steps, 110),
    ]


def _fp16() -> list[Case]:
    half = {"bf16": False, "fp16": True, "max_steps": 40, "logging_steps": 1}
    return [
        Case(6, "tiny zero2 bf16", "tiny", "zero2", {"max_steps": 40, "logging_steps": 1}, 40),
        Case(6, "tiny zero2 fp16", "tiny", "zero2", half, 40),
        Case(6, "tiny zero3 fp16", "tiny", "zero3", half, 40),
        Case(6, "tiny single fp16", "tiny", "single", half, 40),
        Case(6, "pythia-410m zero2 fp16", "pythia-410m", "zero2", half, 50),
    ]


def _side_by_side() -> list[Case]:
    """Micro batches of `micro` rows or packs of 2,048 tokens, 8 a step, as many tokens as a step of `trl sft` has.
    More than one call: the best guesses come first, a further call with the same OUT goes on."""

    def case(model: str, strategy: str, micro: int, words: str = "", **keys: Any) -> Case:
        seconds = {"pythia-410m": 60, "llama-1b": 90, "pythia-1.4b": 100, "pythia-2.8b": 150}[model]
        keys |= {"max_length": 2048, "per_device_train_batch_size": micro, "max_steps": 6}
        keys.setdefault("gradient_accumulation_steps", 8 // micro)
        return Case(7, f"{model} {strategy} {words}".strip(), model, strategy, keys, seconds, ("--side_by_side",))

    uneven = {"packing": True, "gradient_accumulation_steps": 1}  # rows of Alpaca's spread; two packs a step
    best = [
        case("pythia-1.4b", "zero2", 4),
        case("pythia-1.4b", "zero2", 2, "uneven rows, flex_attention", attn_implementation="flex_attention", **uneven),
        case("pythia-1.4b", "zero2", 2, "uneven rows, sdpa", **uneven),
        case("pythia-1.4b", "zero2", 8, "checkpointing", **CHECKPOINTING),
    ]
    stages = [case("pythia-1.4b", name, 4) for name in ("ddp", "zero0", "zero1", "zero3")]
    shapes = [
        *(case("pythia-410m", name, 8) for name in ("zero2", "zero3", "ddp")),
        *(case("llama-1b", name, 4) for name in ("zero2", "zero3")),
        *(case("pythia-2.8b", name, 2) for name in ("zero2", "zero3")),
    ]
    offload = [case("pythia-1.4b", "zero2_offload", 4), case("pythia-2.8b", "zero3_offload", 4)]
    rest = [case(model, name, 4) for model in ("pythia-410m", "llama-1b") for name in ("zero0", "zero1")]
    return [*best, *stages, *shapes, *offload, *rest]
