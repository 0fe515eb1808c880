"""Claims about memory (scripts/claims_page.py)."""

from __future__ import annotations

from scripts.claims_numbers import (
    INFINITY,
    ZERO,
    B,
    Claim,
    per_parameter,
    result,
    saving,
    scenario,
    sent,
    staircase,
    states,
    swept,
    verdict_of,
)
from zero_recipes.core.units import size
from zero_recipes.theory.lower_bounds import resumable_bytes

BYTES = "tests/engine/test_model_states.py::test_bytes_equal_the_allocations"
THEORY = "tests/unit/test_theory.py::test_each_stage_shards_one_part_more"
SCENARIOS = "tests/plan/test_scenarios.py::test_the_page_is_what_the_json_says"
GPT3, PYTHIA = 175 * B, result("pythia_model_states")["models"]["pythia-6.9b"]


def of(strategy: str) -> str:
    return size(swept(strategy)["state_bytes"])


def pythia(strategy: str) -> str:
    return size(PYTHIA["strategies"][strategy]["deepspeed_bytes"])


def activations(batch: int, length: int, layers: int, hidden: int, heads: int) -> tuple[float, float, float]:
    """Bytes in 16 bits of (one input a layer, everything without the scores, with the scores of attention).
    Korthikanti et al., arXiv:2205.05198: sbh(34 + 5as/h) a layer (equation 1); table 2: recomputed whole 2sbh, with the
    scores alone recomputed, as fused attention does it, 34sbh."""
    one = float(length * batch * hidden * layers)
    return 2 * one, 34 * one, 34 * one + 5 * heads * length**2 * batch * layers


KEPT, PLAIN, SCORES = map(size, activations(32, 2048, layers=32, hidden=4096, heads=32))
CHECKPOINT = [resumable_bytes(2 * PYTHIA["parameters"], 12 * PYTHIA["parameters"], stage) for stage in (3, 2)]
BIG = scenario("pythia-6.9b", 2, "b200-192gb")

CLAIMS = (
    Claim(
        "4, 8 and 16 times",
        "the stages save 4, 8 and 16 times, or 4, 8 and N times, the memory",
        f"16Ψ over 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N ({ZERO}, sections 5.1 to 5.3): {saving(2)} times on 2 GPUs, "
        f"{saving(8)} on 8, {saving(64)} on 64, {saving(1024)} on 1,024. 4 and 8 are limits for many GPUs; stage 3 "
        f"saves "
        "N times, 16 of it on 16 GPUs",
        f"model states of two CPU processes, the fullest rank: zero0 {of('zero0')}, zero1 {of('zero1')}, zero2 "
        f"{of('zero2')}, zero3 {of('zero3')}. DeepSpeed's copies inside the step come on top of the formulas",
        "true in the limit",
        (THEORY, BYTES),
    ),
    Claim(
        "12Ψ / 8Ψ / 2Ψ",
        "a GPU holds about 12Ψ, 8Ψ and 2Ψ bytes at the stages 1, 2 and 3",
        f"on 8 GPUs {per_parameter(8)}, on 2 GPUs {per_parameter(2)} ({ZERO}, section 5). 2Ψ is right for exactly 8 "
        f"GPUs, "
        "12Ψ for no whole number of them; 4 times less than 16Ψ would be 4Ψ",
        "the formulas are held to the engine's tensors at 1, 2 and 4 processes, to the byte",
        "false",
        (THEORY, BYTES),
    ),
    Claim(
        "the 8-byte optimizer",
        "Adam keeps 8 bytes a parameter: momentum and variance",
        f"in mixed precision 12: the fp32 master weights are the optimizer's too ({ZERO}, section 3.1). 8 is right "
        f"where "
        "the weights themselves are fp32, as under DDP with autocast and FSDP2; then weights and gradients take 4 each",
        f"two CPU processes: the optimizer of zero0 holds {size(swept('zero0')['optimizer_bytes'])}, that of ddp "
        f"{size(swept('ddp')['optimizer_bytes'])}, of the same {swept('ddp')['parameters']:,} parameters",
        "false",
        ("tests/unit/test_theory.py::test_fp32_has_no_separate_master", BYTES),
    ),
    Claim(
        "1,050 GB for 175B",
        "175 billion parameters take 2,100 GB, on 4 GPUs 1,050 / 788 / 526 GB a GPU at stages 1 / 2 / 3, on 8 at "
        "stage 3 "
        "263 GB",
        f"these leave out the fp32 master. With it {size(states(GPT3, 1, 0))} in all, {staircase(GPT3, 4, (1, 2, 3))} "
        f"on 4 "
        f"GPUs, {size(states(GPT3, 8, 3))} on 8 at stage 3 ({ZERO}, section 3.1)",
        "cannot be measured here; the formula is held to the byte with small models",
        "false",
        (THEORY, BYTES),
    ),
    Claim(
        "7B on 2 and on 8 GPUs",
        "7 billion parameters take 112 / 70 / 63 / 56 GB a GPU at stages 0 to 3 on two, 112 / 38.5 / 26.25 / 14 GB on "
        "eight",
        f"{staircase(7 * B, 2)}; {staircase(7 * B, 8)} ({ZERO}, section 5)",
        f"by DeepSpeed's own allocations, computed for Pythia-6.9B ({PYTHIA['parameters']:,} parameters) on two GPUs: "
        f"{pythia('zero0')}, {pythia('zero1')}, {pythia('zero2')}, {pythia('zero3')}",
        "true",
        ("tests/unit/test_theory.py::test_seven_billion_on_eight_ranks", BYTES),
    ),
    Claim(
        "7.5B on 64 GPUs",
        "7.5 billion parameters on 64 GPUs take 120 / 31.4 / 16.6 / 1.9 GB",
        f"{staircase(7.5 * B, 64)} ({ZERO}, figure 1)",
        "64 GPUs are not here; the formula is held to the byte at 1, 2 and 4 processes",
        "true",
        (THEORY, BYTES),
    ),
    Claim(
        "stage 0 is DDP",
        "stage 0 is plain DDP and holds the same 16Ψ",
        "both keep every state whole: 16Ψ. DDP as fp32 weights, gradients and Adam; DeepSpeed as 16-bit ones with a "
        "master",
        f"DeepSpeed's stage 0 in bf16 copies the gradients to fp32 inside the step: 20Ψ. Two CPU processes: zero0 "
        f"{of('zero0')}, ddp {of('ddp')}; for Pythia-6.9B that is {pythia('zero0')} instead of {pythia('ddp')}",
        "false",
        (BYTES,),
    ),
    Claim(
        "peaks of Pythia-6.9B",
        "on two GPUs one sees peaks of 80 to 110, 60 to 70, 50 to 60 and 30 to 50 GB at stages 0 to 3",
        f"the states alone take {staircase(PYTHIA['parameters'], 2)} ({ZERO}, section 5): the ranges of stages 2 and "
        f"3 lie "
        "whole below that floor",
        f"simulated with the job of recipes/pythia.yaml: {verdict_of(BIG, 'zero0')}; {verdict_of(BIG, 'zero1')}; "
        f"{verdict_of(BIG, 'zero2')}; {verdict_of(BIG, 'zero3')}. Needs two GPUs to be measured",
        "false",
        (SCENARIOS, BYTES),
    ),
    Claim(
        "never the full model at stage 3",
        "at stage 3 no GPU ever holds the whole model",
        f"so by {ZERO}, sections 5.3 and 7.2.2. DeepSpeed releases a parameter only where it is not needed again "
        "within stage3_max_reuse_distance elements, 10⁹ by default",
        f"a model below that stays whole from forward to backward: {sent('stage 3, kept gathered')} in a step instead "
        f"of "
        f"{sent('stage 3, nothing kept')}; parameters below stage3_param_persistence_threshold always do",
        "depends",
        ("tests/engine/test_volume.py::test_each_step_sends_what_the_source_says",),
    ),
    Claim(
        "activations of 10 to 20 GB",
        "activations of a 7B model take 10 to 20 GB at a batch of 32 rows of 2,048 tokens",
        f"{KEPT} where each layer is computed again in backward, {PLAIN} without that and with attention that keeps no "
        f"scores, {SCORES} with the scores (Korthikanti et al., arXiv:2205.05198, table 2; 32 layers of width "
        f"4,096)",
        "needs a GPU; the planner's formula is tested against the paper's",
        "depends",
        ("tests/plan/test_plan_formulas.py::test_activations_are_korthikantis_without_dropout",),
    ),
    Claim(
        "a trillion parameters on 16 GPUs",
        "one trillion parameters train on 16 GPUs of 80 GB with 20 GB of each GPU, 400 GB of host memory and 2 TB of "
        "NVMe",
        f"the states alone are {size(states(1000 * B, 1, 0))}, {size(20 * 1000 * B)} as {INFINITY}, section 3, counts "
        f"them "
        f"(20 bytes a parameter); the 16-bit weights alone are {size(2 * 1000 * B / 16)} a GPU at stage 3. The paper's "
        "run on 16 GPUs (section 8.4) had weights and optimizer on the NVMe of a DGX-2: 28 TB, beside 1.5 TB of host "
        "memory (table 1, figure 2b)",
        "cannot be measured here. Planned, stage 3 with both offloads does not fit: "
        f"{verdict_of(scenario('megatron-1t', 16, 'h100-80gb'), 'zero3_offload').partition(', ')[2]} of a GPU",
        "false",
        (SCENARIOS,),
    ),
    Claim(
        "100 GB of disk",
        "a disk of 100 GB is enough for Pythia-6.9B and its checkpoints",
        f"a checkpoint to go on from is 14Ψ at stage 3, {size(CHECKPOINT[0])}, and 16Ψ at stages 1 and 2, "
        f"{size(CHECKPOINT[1])}: while the second is written, the first still stands",
        "the sizes are those of real checkpoints of a small model; a run whose disk is too small is refused (ZR609)",
        "false",
        ("tests/engine/test_saving.py::test_a_real_checkpoint_is_as_large_as_predicted", "ZR609"),
    ),
)
