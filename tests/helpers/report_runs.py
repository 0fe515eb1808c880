"""Made-up runs for tests of the report: a metrics.json of every strategy."""

import json

from zero_recipes.metrics.read_runs import read_runs

MIB = 1024**2
PARAMETERS = 1_000_000
GPU = "NVIDIA H100 80GB HBM3"
SPEED = {"ddp": 1000.0, "zero0": 990.0, "zero1": 980.0, "zero2": 970.0, "zero3": 750.0}
LOSSES = [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]


def metrics(strategy, **changes):
    """A metrics.json with every key of the contract: bf16 on two GPUs, with the bytes that DeepSpeed really holds."""
    stage = None if strategy == "ddp" else int(strategy[4])
    held = {None: (4, 4, 8), 0: (2, 6, 12), 1: (2, 2, 6), 2: (2, 1, 6), 3: (1, 1, 6)}[stage]
    params, grads, optimizer = (PARAMETERS * each for each in held)
    weights = 2 * PARAMETERS
    moved = {
        None: {"all_reduce": 2 * weights},
        0: {"all_reduce": weights},
        1: {"all_reduce": weights, "all_gather": weights},
        2: {"all_reduce": weights, "all_gather": weights},
        3: {"all_gather": 2 * weights, "reduce_scatter": weights},
    }[stage]
    state = {"params": params, "grads": grads, "optimizer": optimizer, "offloaded_host": 0, "offloaded_disk": 0}
    speed = SPEED.get(strategy, 500.0)
    return {
        "schema": 1, "status": "ok", "error": None, "name": strategy, "strategy": strategy, "zero_stage": stage,
        "world_size": 2, "device": GPU, "model": "org/little-model", "parameters": PARAMETERS,
        "trainable_parameters": PARAMETERS, "precision": "bf16", "micro_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_length": 512,
        "peak_memory_bytes": [{"allocated": 40 * MIB, "reserved": 50 * MIB, "rss": 900 * MIB}] * 2,
        "memory_phases": {"model_loaded": 1, "engine_built": 2, "forward": 3, "backward": 4, "step": 5},
        "model_state_bytes": [state, state],
        "communication_bytes_per_step": moved,
        "tokens": {"all": 9000, "non_padding": 6000, "supervised": 3000},
        "tokens_per_second": {"all": 2 * speed, "non_padding": speed, "supervised": speed / 2},
        "step_seconds": {"median": 0.25, "p90": 0.3, "warmup_steps_excluded": 2},
        "phase_seconds": {"startup": 7.5, "data": 1.0, "model": 2.0, "train": 4.0, "eval": 6.0, "save": 1.0},
        "loss_history": list(LOSSES), "grad_norm_history": [1.0] * len(LOSSES), "eval_history": [],
        "predicted": {"source": "engine", "peak_memory_bytes": 44 * MIB,
                      "model_state_bytes": {"params": MIB, "grads": MIB, "optimizer": 2 * MIB},
                      "at_peak": {"params": 20 * MIB, "activations": 24 * MIB},
                      "reserved_bytes": {"low": 45 * MIB, "high": 50 * MIB}},
        "versions": {"torch": "2.13.0"}, "hardware": {"gpu": GPU, "ram_bytes": 64 * 1024**3},
        "recipe_sha256": "ab" * 32,
    } | changes  # fmt: skip


def on_cpu(strategy, **changes):
    return metrics(strategy, device="cpu", memory_phases=None, peak_memory_bytes=[{"allocated": None, "reserved": None,
                   "rss": 800 * MIB}] * 2, **changes)  # fmt: skip


def save(folder, content, samples=()):
    """Write metrics.json, and samples.jsonl if there are any, into `folder`; returns the folder above it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(content))
    if samples:
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
        (folder / "samples.jsonl").write_text("".join(lines))
    return folder.parent


def sweep(folder, changes=None, make=metrics, strategies=tuple(SPEED)):
    """Runs of all strategies; `changes` maps a strategy to the keys in which it differs from `metrics`."""
    for strategy in strategies:
        save(folder / strategy, make(strategy, **(changes or {}).get(strategy, {})))
    return read_runs(folder)


def sample(before=0.1, after=0.5, loss_before=3.0, loss_after=1.0, **changes):
    """A line of samples.jsonl."""
    return {
        "prompt": "Say <b>hello</b>", "before": "<script>alert(1)</script>", "after": "hello",
        "reference": "hello", "scores_before": {"token_f1": before, "reference_loss": loss_before},
        "scores_after": {"token_f1": after, "reference_loss": loss_after},
    } | changes  # fmt: skip


def oom(strategy):
    """A run that was out of memory before its first step."""
    return {
        "schema": 1, "status": "oom", "error": "CUDA out of memory <sorry>", "name": strategy, "strategy": strategy,
        "world_size": 2, "device": GPU, "model": "org/little-model", "parameters": PARAMETERS,
        "trainable_parameters": PARAMETERS, "precision": "bf16", "loss_history": [], "tokens_per_second": None,
        "peak_memory_bytes": [None, {"allocated": None, "reserved": None, "rss": None}],
        "model_state_bytes": [None, {"params": None, "grads": None, "optimizer": None}],
        "step_seconds": {"median": None, "p90": None, "warmup_steps_excluded": 2},
        "failure": {"phase": "train", "rank": 1, "signal": "SIGKILL",
                    "largest_memory": {"optimizer states": 512 * MIB}},
    }  # fmt: skip
