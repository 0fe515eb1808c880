"""What only runs on a GPU, with stand-ins for torch.cuda and the hub's kernels: the order of calls and their numbers.

docs/correctness.md says what a GPU has run of it.
"""

import statistics
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as draw

from tests.helpers import fake_cuda, flash_stand_in
from zero_recipes.config.strategy import Strategy
from zero_recipes.engine.deepspeed import state_bytes
from zero_recipes.engine.faults.quantized_gradients import scale_for_fp16
from zero_recipes.engine.huggingface import attention_name
from zero_recipes.metrics import callback as callbacks
from zero_recipes.metrics.callback import StageMetricsCallback
from zero_recipes.metrics.failure import write_failure
from zero_recipes.metrics.flops import ModelFlops
from zero_recipes.metrics.probe import UsedFlops
from zero_recipes.metrics.schema import Metrics, PredictedMetrics, RunIdentity
from zero_recipes.model import load

MIB = 2**20


@pytest.fixture
def cuda(monkeypatch) -> fake_cuda.FakeCuda:
    return fake_cuda.install(monkeypatch)


def training(cuda, steps: int, folder, monkeypatch, device=None, log_every: int = 10**9):
    """The callback through `steps` optimizer steps of a model of one layer, of which step n takes n seconds.

    (metrics.json, calls of torch.cuda before, by step, after; what is logged).
    """
    monkeypatch.setattr(callbacks, "gather_object", list)
    identity = IDENTITY if device is None else IDENTITY.model_copy(update={"device": device})
    monkeypatch.setattr(callbacks.schema, "RunIdentity", lambda **_: identity)
    model = torch.nn.Linear(4, 4)
    config = SimpleNamespace(num_attention_heads=2, hidden_size=4, num_hidden_layers=1)
    model.config = SimpleNamespace(get_text_config=lambda: config)
    optimizer = torch.optim.AdamW(model.parameters())
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1)
    args.bf16, args.fp16, args.device = True, False, torch.device("cuda")
    cuda.hold(100 * MIB)
    found = StageMetricsCallback(folder, Strategy("single", 1), PredictedMetrics(peak_memory_bytes=7, source="engine"))
    found.engine = model
    found.identify(args, model)
    cuda.hold(900 * MIB)  # samples before training, with a cache of keys and values
    cuda.hold(150 * MIB)
    state = SimpleNamespace(max_steps=steps, global_step=0)
    found.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    before, by_step, logs = list(cuda.calls), [], []
    ids = torch.ones(2, 8, dtype=torch.long)
    for step in range(1, steps + 1):
        cuda.calls.clear()
        found.on_step_begin(None, state, None)
        for micro in range(2):
            found.count_tokens({"input_ids": ids, "labels": ids})
            cuda.hold((200 + step + micro) * MIB)
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            cuda.queue(step / 2)
            found.add_loss(loss.detach() * 0 + step / 2)
        optimizer.step()
        found.add_norm(torch.tensor(0.5 * step))
        optimizer.zero_grad()
        cuda.hold(180 * MIB)
        found.on_step_end(None, state, None)
        by_step.append(list(cuda.calls))
        if step % log_every == 0:
            logs.append(found.since_last_log())
            cuda.queue(100.0)  # an evaluation
            found.on_evaluate(None, state, None)
    cuda.calls.clear()
    found.end_steps()
    found.write()
    return Metrics.read(folder / "metrics.json"), before, by_step, list(cuda.calls), logs


IDENTITY = RunIdentity(
    name="r", strategy="single", world_size=1, device="NVIDIA Stand-in", model="m", parameters=20,
    trainable_parameters=20, precision="bf16", micro_batch_size=2, gradient_accumulation_steps=2, recipe_sha256="ab",
)  # fmt: skip


@pytest.mark.parametrize("steps", [3, 12])
def test_a_training_on_a_gpu(cuda, monkeypatch, tmp_path, steps):
    row, before, by_step, after, _ = training(cuda, steps, tmp_path, monkeypatch)
    assert before == ["empty_cache", "reset_peak_memory_stats"]
    assert by_step == [[]] * steps and after == ["synchronize"], "a step waits for nothing but its two numbers"
    (peak,) = row.peak_memory_bytes
    assert peak.allocated == peak.reserved == (201 + steps) * MIB, "what samples took is not the training's"
    phases = row.memory_phases
    assert (phases["model_loaded"], phases["engine_built"]) == (100 * MIB, 150 * MIB)
    assert [phases[name] // MIB for name in ("forward", "backward", "step")] == [203, 203, 180], "of the second step"
    timed = list(range(1, steps + 1))[row.step_seconds.warmup_steps_excluded :]
    assert min(timed) > 2, "the probed step is none of them"
    assert row.step_seconds.median == pytest.approx(statistics.median(timed))
    assert row.tokens.all == 32 * steps and row.tokens_per_second.all == pytest.approx(32 * len(timed) / sum(timed))
    assert row.loss_history == list(range(1, steps + 1))
    assert row.grad_norm_history == [0.5 * step for step in range(1, steps + 1)]
    assert (row.hardware["gpu"], row.hardware["gpu_memory_bytes"]) == ("NVIDIA Stand-in", 80 * fake_cuda.GIB)


def test_mfu_is_of_the_timed_steps_and_of_the_card(cuda, monkeypatch, tmp_path):
    """Weights of 4 x 4, attention of 2 heads x (2 + 2); a step of 4 rows of 8 tokens, step n in n seconds."""
    row, *_, logs = training(cuda, 12, tmp_path, monkeypatch, device="NVIDIA H100 80GB HBM3", log_every=4)
    flops = 6 * 16 * 32 + 3 * 8 * 4 * 8**2
    timed = range(1 + row.step_seconds.warmup_steps_excluded, 13)
    assert row.model_flops_per_token == pytest.approx(flops / 32)
    assert row.model_flops_per_second == pytest.approx(len(timed) * flops / sum(timed))
    assert row.mfu == pytest.approx(row.model_flops_per_second / 989e12)
    assert [log.get("planned_peak_memory_bytes") for log in logs] == [7, None, None], "once"
    assert logs[-1]["peak_memory_bytes"] == row.peak_memory_bytes[0].allocated
    for log, steps in zip(logs, (range(1, 5), range(5, 9), range(9, 13)), strict=True):
        assert log["tokens_per_second"] == round(4 * 32 / sum(steps)), "evaluations are no part of it"
        assert log["mfu"] == pytest.approx(4 * flops / sum(steps) / 989e12)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_two_steps_says_that_nothing_was_timed(cuda, monkeypatch, tmp_path, steps):
    row, *_ = training(cuda, steps, tmp_path, monkeypatch)
    assert row.status == "ok" and row.tokens_per_second is None
    assert row.step_seconds.median is row.step_seconds.p90 is None
    assert row.step_seconds.warmup_steps_excluded == steps and row.model_state_bytes[0].optimizer > 0
    assert row.memory_phases["step"] == 180 * MIB


@pytest.mark.parametrize("repeated", [False, True])
def test_counting_tokens_and_losses_reads_nothing_back(repeated):
    """Tensors without memory: a number that is read out of one, or copied between it and the host, is an error."""
    found = StageMetricsCallback.__new__(StageMetricsCallback)
    found.tokens = found.tokens_timed = found.has_labels = None
    found.losses, found.done, found.warmup = [], 0, 0
    found.used = UsedFlops.__new__(UsedFlops)
    found.used.model = ModelFlops(10, 10, {None: 4, 5: 2})
    for _ in range(3):
        ids = torch.ones(2, 8, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        found.count_tokens(batch, torch.zeros_like(ids, dtype=torch.bool) if repeated else None)
        found.add_loss(torch.ones((), dtype=torch.bfloat16, device="meta"))
        found.add_norm(torch.ones((), device="meta"))
    assert found.tokens.device.type == found.losses[0].device.type == found.norm.device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        found.tokens.tolist()


def test_a_failure_on_a_gpu_names_what_held_its_memory(cuda, tmp_path):
    cuda.hold(10 * MIB)
    states = {"params": 4 * MIB, "grads": 0, "optimizer": 5 * MIB, "offloaded_host": 64 * MIB}
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert write_failure(tmp_path, "train", cublas, states).status == "oom"
    failure = write_failure(tmp_path, "train", torch.OutOfMemoryError("CUDA out of memory."), states)
    held = [(part.split()[0], size) for part, size in failure.largest_memory.items()]
    assert failure.status == "oom"
    assert held == [("offloaded_host", 64 * MIB), ("optimizer", 5 * MIB), ("params", 4 * MIB), ("activations,", MIB)]


def test_a_counter_on_the_host_is_no_offloaded_state(monkeypatch):
    """torch's AdamW keeps its step counts on the host beside states on the GPU (adam.py, `_init_group`); "meta" stands
    for the GPU here."""
    monkeypatch.setattr("zero_recipes.engine.deepspeed._training_device", lambda: "meta")
    model = torch.nn.Linear(8, 8, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    found = state_bytes(model, list(model.parameters()), optimizer, False, False)
    assert found == {"params": 288, "grads": 288, "optimizer": 2 * 288 + 8, "offloaded_host": 0}


def test_an_optimizer_that_is_not_known_is_not_counted_as_0_bytes():
    class Unknown:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

    with pytest.raises(TypeError, match="Unknown is none of DeepSpeedZeroOptimizer"):
        state_bytes(torch.nn.Module(), [], Unknown(), False, False)


KERNEL = "kernels-community/flash-attn2"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def loaded(attn_implementation: str | None):
    """A small Llama as the recipe's attn_implementation makes it."""
    keys = {"model_name_or_path": "m", "dtype": "float32", "attn_implementation": attn_implementation}
    keys |= {"load_in_4bit": False, "load_in_8bit": False, "model_init_kwargs": None, "trust_remote_code": False}
    keys |= {"deepspeed": None, "use_peft": False}
    arguments = SimpleNamespace(**keys, seed=0, random_weights=True)
    return load.load_model(transformers.LlamaConfig(**SIZES), arguments)


def test_a_kernel_of_the_hub_is_what_was_requested_and_computes_what_sdpa_does(monkeypatch):
    """transformers goes by the kernel's name then, which is not the recipe's; DeepSpeed compares it (ulysses_sp.py)."""
    flash_stand_in.install(monkeypatch)
    for requested in ("flash_attention_2", KERNEL):
        assert loaded(requested).config._attn_implementation == KERNEL == attention_name(requested)
    assert attention_name("sdpa") == "sdpa" and attention_name(None) is None
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(*(loaded(name).eval()(ids).logits for name in ("sdpa", KERNEL)))


@settings(max_examples=40)
@given(
    seed=draw.integers(0, 2**31),
    world=draw.sampled_from([2, 3, 4, 6, 8, 16, 24, 256, 1000]),
    dtype=draw.sampled_from([torch.bfloat16, torch.float32]),
    power=draw.floats(-20, 36),
)
def test_the_scale_keeps_values_and_their_sum_within_fp16(seed, world, dtype, power):
    values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    given = (values * 10**power).clamp(-3e38, 3e38).to(dtype)
    scale = scale_for_fp16(given.abs().max().float(), world, dtype)
    scaled = (given * scale.to(dtype)).half()
    assert torch.frexp(scale).mantissa.item() == 0.5, "a power of two: scaling rounds nothing"
    assert scaled.double().abs().max() * world <= 2**15
    back, largest = scaled.double() / scale.double(), given.double().abs().max()
    assert torch.allclose(back, given.double(), rtol=2**-10, atol=float(largest) * 2**-24 * world)


def test_the_scale_of_nothing_of_fp16_and_of_what_is_not_finite():
    assert scale_for_fp16(torch.tensor(0.0), 4, torch.bfloat16).isfinite()
    assert scale_for_fp16(torch.tensor(torch.inf), 4, torch.bfloat16) == 1
    for largest in (6e-8, 1e-3, 65504.0):  # the scale itself must be a number of fp16
        assert 0 < scale_for_fp16(torch.tensor(largest), 8, torch.float16).half() <= 2**15
