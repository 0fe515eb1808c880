"""docs/claims.md: numbers from theory, hardware.yaml or committed JSON; every proof is a test or a code that exists."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from scripts import claims_page, claims_steps
from scripts.claims_numbers import VERDICTS, gpus, result
from zero_recipes.core.findings import table

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = [claim for group in claims_page.GROUPS.values() for claim in group]
SETTLED = [  # words of claims that must be there
    "4, 8 and 16 times", "12Ψ / 8Ψ / 2Ψ", "8-byte optimizer", "1,050 to 175 GB", "Gb and GB", "offload 20 to 30 %",
    "Infinity 30 to 50 %", "stage 3 slower by 10 to 40 %", '"500 MB" buckets', "delayed parameter update",
    "save_checkpoint on rank 0 alone", "FSDP is for less than 100B",
]  # fmt: skip


def test_the_page_is_what_the_sources_say():
    assert claims_page.main(["--check"]) == 0, "run python scripts/claims_page.py"


@pytest.mark.parametrize("words", SETTLED)
def test_each_named_claim_is_settled_once(words):
    assert len([claim for claim in CLAIMS if words in claim.name]) == 1


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_has_a_verdict_and_proofs_that_exist(claim):
    assert claim.verdict in VERDICTS and claim.derived and claim.measured and claim.proof
    for proof in claim.proof:
        if proof.startswith("ZR"):
            assert proof in table()
        else:
            path, _, name = proof.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), proof
    if claim.verdict == "needs a GPU":
        assert re.search(r"GPU|NVLink|link|disk|B200|streams", claim.derived + claim.measured), "it does not say why"


def test_no_claim_is_made_twice():
    assert len({claim.name for claim in CLAIMS}) == len({claim.said for claim in CLAIMS}) == len(CLAIMS) > 35


def test_links_are_in_bytes():
    """InfiniBand of 400 Gb/s is 50 GB/s: no machine's network of the table is faster than its own NVLink by mistake."""
    assert gpus()["h100-80gb"]["network_gb_s"] * 8 == 400 and gpus()["a100-80gb"]["network_gb_s"] * 8 == 200
    assert all(gpu["network_gb_s"] <= 100 for gpu in gpus().values())


def test_no_key_delays_the_update():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    keys = {*DeepSpeedZeroOffloadOptimizerConfig.model_fields, *DeepSpeedZeroConfig.model_fields}
    assert "ratio" in keys and not [key for key in keys if "delay" in key or "dpu" in key]


def test_a_run_moved_what_infinity_is_said_to_move():
    """16 bytes of each element of its part; of some the 16-bit weight too, which forward and backward read."""
    run = result("zero_family")["offload"]["zero3_infinity"]
    part = run["parameters"] / len(run["model_state_bytes"])
    for moved in run["nvme"]["bytes_per_step"]:
        assert 16 * part < moved["written"] < 18 * part and 16 * part < moved["read"] < 20 * part
    assert claims_steps.SWAPPED == 16 * 7e9 / 2


def test_live_parameters_only_limit_the_prefetcher():
    """Whoever releases by them again makes the page wrong."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    lines = [line.strip() for line in inspect.getsource(coordinator).splitlines() if "max_n_available_params" in line]
    assert len(lines) == 2 and lines[1].startswith("max_params_to_prefetch = min(")


def test_comments_are_no_json():
    with pytest.raises(json.JSONDecodeError):
        json.loads('{"zero_optimization": {"stage": 2, // gradients too\n "overlap_comm": true}}')


def test_aio_reads_no_thread_count():
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    found = get_aio_config({"aio": {"thread_count": 7, "intra_op_parallelism": 3}})
    assert "thread_count" not in found and found["intra_op_parallelism"] == 3


def test_memory_status_resets_the_peak():
    from deepspeed.runtime import utils

    source = inspect.getsource(utils.memory_status)
    assert "reset_max" in source and "reset_max_memory_allocated" in source
