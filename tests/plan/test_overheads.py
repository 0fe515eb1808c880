"""What a GPU holds beside the counted tensors: one set of numbers, for formulas and for the engine's simulation."""

from __future__ import annotations

import shutil

import pytest
from pydantic import ValidationError

from tests.helpers.plan_jobs import job
from zero_recipes.plan import overheads as module
from zero_recipes.plan.formulas.predict import predict_by_formulas
from zero_recipes.plan.overheads import FILE, overheads, read_overheads, write_fitted
from zero_recipes.plan.simulator import parent

FOUND = {
    "parameters": 10,
    "trainable_parameters": 10,
    "gradient_accumulation_steps": 1,
    "allocated_peak_bytes": 900,
    "peak_phase": "step",
    "peak_operator": "",
    "at_peak": {},
    "peaks": {},
    "communication_bytes_per_step": {},
    "flops_per_step": 1,
    "reserved_peak_bytes": 10**10,
    "model_state_bytes": dict.fromkeys(("params", "grads", "optimizer", "offloaded_host", "offloaded_disk"), 0),
    "memory_phases": dict.fromkeys(("model_loaded", "engine_built", "forward", "backward", "step"), 0),
    "host_load": 0,
    "host_training": 0,
    "imports": 0,
    "seconds": 1.0,
    "resident_bytes": 1,
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_formulas_and_simulation_add_the_same(ranks):
    known = overheads()
    beside = int(known.context.value) + (int(known.communicator.value) if ranks == 2 else 0)
    by_engine = parent._prediction(job("zero2", ranks), [FOUND])
    by_formulas = predict_by_formulas(job("zero2", ranks))
    for found, segments in ((by_engine, 10**10), (by_formulas, by_formulas.allocated_peak_bytes)):
        assert found.reserved_bytes.low == segments + beside
        assert found.reserved_bytes.high == int(segments * known.fragmentation.value) + beside
    assert by_engine.segment_bytes == 10**10 and by_formulas.segment_bytes is None


def test_every_number_has_a_source_and_says_whether_it_was_measured():
    known = overheads()
    for entry in (known.context, known.communicator, known.fragmentation):
        assert entry.source and (entry.measured or entry.source.startswith("Assumed"))


def test_fitted_numbers_take_their_place_and_the_rest_stays(tmp_path):
    path = tmp_path / "overheads.yaml"
    shutil.copy(FILE, path)
    before = read_overheads(path)
    write_fitted({"context": (512_000_000.0, "results/a.json"), "fragmentation": (1.08, "results/b.json")}, path)
    after = read_overheads(path)
    assert after.measured and after.context.value == 512_000_000 and after.fragmentation.source == "results/b.json"
    assert after.communicator == before.communicator
    head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().splitlines()[: len(head)] == head
    assert after.reserved_range(10**10, 1).high == 1.08 * 10**10 + 512_000_000
    with pytest.raises(ValidationError):
        write_fitted({"fragmentation": (0.9, "results/b.json")}, path)
    assert read_overheads(path) == after


def test_other_overheads_are_another_answer(monkeypatch, tmp_path):
    """A kept prediction is not taken for one with other numbers."""
    from zero_recipes.plan import predict

    assert (predict.Path(predict.__file__).parent / "overheads.yaml") == module.FILE
    first = predict._own_code.__wrapped__()
    real = predict.Path.read_bytes
    monkeypatch.setattr(
        predict.Path, "read_bytes", lambda path: b"other" if path.name == "overheads.yaml" else real(path)
    )
    assert predict._own_code.__wrapped__() != first


def test_the_simulation_counts_page_locked_memory_as_torch_takes_it(monkeypatch):
    import torch

    from zero_recipes.plan.simulator.tracker import LiveStorages

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_cached_size_mb:1")
    host = LiveStorages("cpu")
    kept = [torch.empty(size, dtype=torch.uint8) for size in (600_000, 600_000, 1_500_000)]
    host.see(kept[0], "pageable")
    with host.pinning():
        host.see(kept[1], "rounded: below the limit")
        host.see(kept[2], "as it is: above the limit")
    assert host.live == 600_000 + 2**20 + 1_500_000
