"""Claims about communication, speed, ZeRO++ and offload (scripts/claims_page.py)."""

from __future__ import annotations

from scripts.claims_numbers import (
    INFINITY,
    OFFLOAD,
    PLUS_PLUS,
    ZERO,
    B,
    Claim,
    gpus,
    knob,
    result,
    sent,
    slower,
    swept,
)
from zero_recipes.core.units import rate, significant, size
from zero_recipes.theory.deepspeed_comm import volume_terms
from zero_recipes.theory.zero_paper import communication_units, plus_plus_units

VOLUME = "tests/engine/test_volume.py::test_each_step_sends_what_the_source_says"
TEXTBOOK = "tests/engine/test_volume.py::test_the_textbooks_volume_has_the_textbooks_collectives"
BETWEEN = "tests/engine/test_plus_plus.py::test_what_crosses_between_nodes_is_what_the_paper_says"
SIMULATED_QUANTIZER = "four CPU processes that stand for two machines, with a quantizer in plain torch"
SWITCHED = "stage 2, textbook's switch"
UNIT = 2 * 175 * B  # bytes of 175 billion parameters in 16 bits
H100, A100 = gpus()["h100-80gb"], gpus()["a100-80gb"]
OFFLOADED = result("zero_family")["offload"]
DISK = OFFLOADED["zero3_infinity"]["nvme"]["disks"][0]
EQUAL = result("equivalence")
PLUS = result("zero_family")["plus_plus"]
UNITS = {
    name: UNIT * plus_plus_units(*parts)
    for name, parts in {
        "qwZ": (False, True, False),
        "hpZ": (True, False, False),
        "all": (True, True, True),
    }.items()
}
SWAPPED = 16 * 7 * B / 2  # bytes of optimizer states and fp32 gradients of 7 billion parameters, on each of two ranks
MOVED = OFFLOADED["zero3_infinity"]["nvme"]["bytes_per_step"][0]


def step(strategy: str) -> str:
    return f"{OFFLOADED[strategy]['step_seconds']:.2f} s"


def between(strategy: str) -> str:
    return f"{PLUS[strategy]['between_nodes_phi']:.2f}Φ"


def source(stage: int, micro_steps: int = 1) -> str:
    return f"{sum(volume_terms(stage, micro_steps).values()):g}Φ"


COMMUNICATION = (
    Claim(
        "2Φ, and 3Φ at stage 3",
        "stages 0 to 2 send 2Φ in a step and stage 3 sends 3Φ",
        f"{communication_units(0)}Φ and {communication_units(3)}Φ ({ZERO}, section 7): an all-reduce is a "
        f"reduce-scatter and "
        "an all-gather. An all-reduce followed by a gather is 3Φ: the textbook's 2Φ needs the reduce-scatter",
        f"two CPU processes: stage 0 {sent('stage 0')}, stage 1 {sent('stage 1')}, stage 2 {sent('stage 2')} "
        f"(DeepSpeed "
        f"all-reduces whole buckets; {sent(SWITCHED)} with use_multi_rank_bucket_allreduce false), stage "
        f"3 {sent('stage 3, nothing kept')}, {sent('stage 3, kept gathered')} where the model stays gathered. Bytes "
        f"do not "
        "depend on the device",
        "depends",
        (VOLUME, TEXTBOOK),
    ),
    Claim(
        "nothing after the step at stage 1",
        "stage 1 communicates nothing after the optimizer's step, or gathers optimizer states",
        f"each rank has updated its part of the parameters, which the others need: a gather of Φ, of parameters and "
        f"not of "
        f"optimizer states ({ZERO}, section 7.2.1)",
        f"{sent('stage 1')}: all-reduce of the gradients and gather of the parameters, seen by DeepSpeed's logger",
        "false",
        (VOLUME,),
    ),
    Claim(
        "accumulation saves communication",
        "with stages 2 and 3 accumulation spreads the communication over several micro steps",
        "a rank that keeps only its part of the gradients must reduce in every micro step; at stage 3 it gathers in "
        "every "
        f"one too. DeepSpeed: {source(2, 4)} at stage 2 with four, {source(1, 4)} at stage 1",
        f"four micro steps: stage 1 {sent('stage 1', 4)}, stage 2 {sent('stage 2', 4)}, stage 3 "
        f"{sent('stage 3, nothing kept', 4)}",
        "false",
        (VOLUME,),
    ),
    Claim(
        "stages 0, 1 and 2 within 5 %",
        "stages 0, 1 and 2 are equally fast, within 5 %",
        f"by volume in the paper alike; DeepSpeed's stages 1 and 2 send {source(2)} against {source(0)}. What that "
        f"costs "
        "depends on the link and on how much of it the computation hides",
        f"12 million parameters, two CPU processes, bare DeepSpeed loop: stage 1 {slower('zero1', 'zero0')} and stage "
        f"2 "
        f"{slower('zero2', 'zero0')} than stage 0. Over gloo on two shared cores: it says nothing of NVLink",
        "needs a GPU",
        ("tests/engine/test_throughput.py::test_the_four_programs_train_the_same_rows_to_the_same_loss",),
    ),
    Claim(
        "stage 3 slower by 10 to 40 %",
        "stage 3 is 20 to 40 %, elsewhere 10 to 20 %, slower than stage 2",
        "3Φ against 2Φ (paper) or 3Φ (DeepSpeed's stage 2): no formula gives a percentage without the link, the batch "
        "and "
        "the model's size",
        f"12 million parameters, two CPU processes: {slower('zero3', 'zero2')} than stage 2, "
        f"{slower('zero3', 'zero0')} than "
        "stage 0; small models stay gathered. A GPU and its link are needed for the percentage of a real run",
        "needs a GPU",
        (VOLUME,),
    ),
    Claim(
        "Gb and GB",
        "InfiniBand moves 400 GB/s, so that 1,050 GB take 2.6 s",
        f"it is 400 Gb/s: {H100['network_gb_s']} GB/s for each GPU of a DGX H100, {A100['network_gb_s']} GB/s of a "
        f"DGX A100 "
        f"(core/hardware.yaml). 1,050 GB take {significant(1050 / H100['network_gb_s'])} s. NVLink's "
        f"{2 * A100['link_gb_s']} GB/s of an A100 count both directions, {A100['link_gb_s']} GB/s in one",
        "no such network is here; a run on several machines measures its own and prints it (metrics.json, network)",
        "false",
        ("tests/unit/test_claims.py::test_links_are_in_bytes",),
    ),
    Claim(
        "identical loss curves",
        "all stages have the same loss curve, because only memory is managed otherwise",
        "the same sums in another order: equal but for rounding",
        f"in fp32 the losses of all strategies lie within {max(EQUAL['deltas']['loss'].values()):.0e} of a plain "
        f"PyTorch loop "
        f"over {EQUAL['steps']} steps, the weights within {max(EQUAL['deltas']['weight'].values()):.0e}. In bf16 "
        f"gradients "
        "are summed and reduced in 16 bits: "
        f"{abs(swept('zero3')['final_loss'] / swept('ddp')['final_loss'] - 1):.1%} between ddp and zero3 after "
        f"{swept('zero3')['steps']} steps",
        "true",
        ("tests/engine/test_equivalence.py::test_the_committed_grid_is_whole_and_within_the_tolerance",),
    ),
    Claim(
        "overlap_comm is essential",
        "overlap_comm is needed for stage 3 to be fast",
        "no formula; communication on a stream of its own can hide behind computation",
        f"two CPU processes, which have no streams: {knob('overlap', 'zero3', True)['step_seconds_median']:.3f} s "
        f"with it, "
        f"{knob('overlap', 'zero3', False)['step_seconds_median']:.3f} s without. Needs a GPU",
        "needs a GPU",
        ("tests/unit/test_sweep.py::test_the_page_of_the_knobs_says_what_was_measured",),
    ),
)  # fmt: skip

PLUS_PLUS_CLAIMS = (
    Claim(
        "1,050 to 175 GB",
        "of 1,050 GB in a step of 175 billion parameters qwZ leaves 525, hpZ 350 and all of ZeRO++ 175 GB",
        f"two gathers and a reduction of {size(UNIT)} each: qwZ halves a gather, hpZ keeps that of backward in the "
        f"node, qgZ makes the reduction a quarter, so that 3 units become 0.75 with all three ({PLUS_PLUS}). By the "
        "same count 2 are left with hpZ alone, and with qwZ alone, which in DeepSpeed halves both gathers: "
        f"{size(3 * UNIT)} become {size(UNITS['qwZ'])}, {size(UNITS['hpZ'])} and {size(UNITS['all'])} between machines",
        f"{SIMULATED_QUANTIZER}: {between('zero3')} become {between('zero3_qwz')}, {between('zero3_hpz')} and "
        f"{between('zero3_plus_plus')}",
        "false",
        (BETWEEN, "tests/engine/test_volume.py::test_plus_plus_by_the_paper"),
    ),
    Claim(
        "throughput of 140, 180 and 220 %",
        "qwZ, hpZ and all of ZeRO++ reach 140, 180 and 220 % of stage 3's throughput",
        f"{PLUS_PLUS}, abstract: up to 2.16 times on 384 GPUs; nothing of the kind follows from the volume alone",
        "cannot be measured here: it needs several machines with GPUs",
        "needs a GPU",
        (BETWEEN,),
    ),
    Claim(
        "qwZ sends a quarter",
        "qwZ makes the gathers four times smaller",
        f"int8 instead of 16 bits: half of a gather, plus a scale for each block ({PLUS_PLUS}, section 3.1)",
        f"{SIMULATED_QUANTIZER}: {between('zero3_qwz')} instead of {between('zero3')}, gathers of 0.5Φ + 0.5Φ and 1Φ "
        f"of "
        "gradients",
        "false",
        (BETWEEN,),
    ),
    Claim(
        "hpZ gives each node one shard",
        "hpZ gives all GPUs of a node the same shard, for twice the memory",
        "each node holds a second, complete 16-bit copy, cut over its own GPUs: 2Ψ divided by their number more. It "
        "saves "
        f"the gather between nodes in backward alone ({PLUS_PLUS}, section 3.2)",
        f"parameters on a rank: {size(PLUS['zero3_hpz']['params_bytes'])} instead of "
        f"{size(PLUS['zero3']['params_bytes'])} "
        f"on two nodes of two; {between('zero3_hpz')} instead of {between('zero3')}",
        "false",
        ("tests/engine/test_plus_plus.py::test_hpz_costs_a_copy_of_the_weights_in_each_node", BETWEEN),
    ),
    Claim(
        "qgZ is a quantised reduce-scatter",
        "qgZ rounds gradients to int8 and reduces and scatters them",
        f"it is an int4 all-to-all, within the node and then between nodes; sums are taken in full precision "
        f"({PLUS_PLUS}, section 3.3; "
        "DeepSpeed 0.19.8, runtime/comm/coalesced_collectives.py, all_to_all_quant_reduce): a quarter of Φ",
        f"{SIMULATED_QUANTIZER}: {between('zero3_qgz')} instead of {between('zero3')}",
        "false",
        (BETWEEN,),
    ),
)

OFFLOAD_CLAIMS = (
    Claim(
        "offload 20 to 30 % slower",
        "offload to the CPU makes a run 20 to 30 % slower",
        f"{OFFLOAD}, sections 3.3 and 4.2: gradients go to the host and weights back, 2Ψ/N bytes each in a step, and "
        "Adam runs there. For "
        f"7B on two GPUs that is {size(7 * B)} each way, {significant(7 / A100['host_gb_s'])} s over the "
        f"{A100['host_gb_s']} GB/s of "
        "PCIe 4; what that is of a step depends on how many tokens it has",
        f"two CPU processes, which have no such link: zero2 {step('zero2')}, zero2_offload {step('zero2_offload')}; "
        f"zero3 "
        f"{step('zero3')}, zero3_offload {step('zero3_offload')}",
        "needs a GPU",
        ("tests/plan/test_plan_command.py::test_offload_pays_for_the_link_and_for_adam_on_the_cpu",),
    ),
    Claim(
        "Infinity 30 to 50 % slower",
        "with NVMe a run is 30 to 50 % slower",
        "16 bytes a parameter are read and written in every step, the optimizer's 12 and the fp32 gradient "
        f"({INFINITY}, section 4.1, and DeepSpeed's swap files). For 7B on two GPUs "
        f"{size(SWAPPED)} each way a rank: {significant(2 * SWAPPED / 7e9)} s at 7 GB/s for each of them, whatever "
        f"the step "
        "computes",
        f"two CPU processes and a disk that writes {rate(DISK['write_bytes_per_second'])} and reads "
        f"{rate(DISK['read_bytes_per_second'])}: zero3 {step('zero3')}, zero3_infinity {step('zero3_infinity')} for "
        f"12 million parameters, of which each rank writes {size(MOVED['written'])} and reads {size(MOVED['read'])} "
        "in a step, some of the parameters with them",
        "needs a GPU",
        ("tests/engine/test_infinity.py::test_states_were_on_the_disk_and_went_there_and_back",
            "tests/unit/test_claims.py::test_a_run_moved_what_infinity_is_said_to_move",
        ),
    ),
    Claim(
        "delayed parameter update",
        "DeepSpeed runs Adam on the CPU while the GPU computes the next step",
        f"that is the one-step delayed update of {OFFLOAD}, section 5.2, which changes what is trained: a step uses "
        f"weights "
        "that are one update old",
        "not in DeepSpeed 0.19.8: no key of offload_optimizer asks for it (its authors: deepspeedai/DeepSpeed#1260). "
        "Losses "
        "with and without offload agree to "
        f"{max(EQUAL['deltas']['loss']['zero2_offload'], EQUAL['deltas']['loss']['zero3_offload']):.0e} in fp32, "
        f"which a "
        "delayed update could not do. ZenFlow, which lets Adam lag behind in another way, is refused",
        "false",
        ("tests/unit/test_claims.py::test_no_key_delays_the_update",
            "tests/engine/test_equivalence.py::test_a_part_of_the_grid",
            "ZR238",
        ),
    ),
    Claim(
        "PCIe 25 to 32 GB/s, NVMe 7 GB/s",
        "the link to the host moves 25 to 32 GB/s, an NVMe disk 7 GB/s",
        f"PCIe 4 x16: {A100['host_gb_s']} GB/s in one direction, PCIe 5 {H100['host_gb_s']} GB/s (core/hardware.yaml, "
        f"datasheets). "
        "All GPUs of a machine share its disk",
        f"the disk here writes {rate(DISK['write_bytes_per_second'])} and reads {rate(DISK['read_bytes_per_second'])} "
        f"past the "
        "page cache. A run measures link and disk before it trains, and prints both; the link has been measured on no "
        "GPU",
        "depends",
        ("tests/engine/test_infinity.py::test_the_disk_is_measured_with_what_is_written",),
    ),
    Claim(
        "10B to 30B on a consumer card",
        "with offload a card of 24 GB and 256 GB of host memory train 10 to 30 billion parameters",
        f"stage 2 leaves the 16-bit weights on the card: {size(2 * 10 * B)} of 10 billion, {size(2 * 30 * B)} of 30. "
        f"Stage 3 takes these to the host too, and DeepSpeed then holds 20 bytes a parameter there: "
        f"{size(20 * 10 * B)} and {size(20 * 30 * B)}",
        f"two CPU processes: zero2_offload leaves "
        f"{OFFLOADED['zero2_offload']['model_state_bytes'][0]['params'] / OFFLOADED['zero2_offload']['parameters']:g} "
        "bytes a parameter on the device. The card needs a GPU to be shown",
        "depends",
        ("tests/plan/test_plan_formulas.py::test_offload_leaves_the_gpu_and_lands_in_the_host",),
    ),
)  # fmt: skip
