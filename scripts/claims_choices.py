"""Claims about configuration, checkpoints and the choice of a strategy (scripts/claims_page.py)."""

from __future__ import annotations

from scripts.claims_numbers import B, Claim, knob, result, scenario, sent, simulated_peak, staircase, verdict_of
from zero_recipes.core.units import parameters, size

CONTRADICT = "tests/unit/test_checks.py::test_ds_configs_that_contradict_the_run"
SCENARIOS = "tests/plan/test_scenarios.py::test_the_page_is_what_the_json_says"
CLAIMS_TEST = "tests/unit/test_claims.py::"
BUCKETS = (5 * 10**7, 5 * 10**8)  # elements
PEAKS = [simulated_peak("reduce_bucket", "zero3", elements) for elements in BUCKETS]
EACH = (PEAKS[1] - PEAKS[0]) / (BUCKETS[1] - BUCKETS[0])
FSDP = {row["strategy"]: row for row in result("fsdp")["rows"]}
ROWS = result("rows")["rows"]
PAIRS = result("reshard")
LIVE = [knob("max_live", "zero3", value)["communication_bytes"] for value in (0, 10**9)]
REUSE = [knob("max_reuse", "zero3", value)["communication_bytes"] for value in (0, 10**9)]
LIVE_PEAK = [simulated_peak("max_live", "zero3", value) for value in (0, 10**9)]
REUSE_PEAK = [simulated_peak("max_reuse", "zero3", value) for value in (0, 10**9)]


def said_and_found(model: str, count: int, gpu: str) -> str:
    row = scenario(model, count, gpu)
    return f"{verdict_of(row, row['strategy'])}; fits: {row['recommended'] or 'nothing here'}"


CONFIGURATION = (
    Claim(
        '"500 MB" buckets',
        "a reduce_bucket_size of 500,000,000 is a bucket of 500 MB",
        f"it counts elements (DeepSpeed 0.19.8, runtime/zero/stage3.py: a buffer of reduce_bucket_size in the "
        f"gradients' "
        f"dtype): {size(2 * BUCKETS[1])} in bf16. With overlap_comm stages 1 and 2 hold two",
        f"the engine's buffer has as many elements and twice as many bytes; simulated peak of stage 3: "
        f"{size(PEAKS[0])} with "
        f"{BUCKETS[0]:,} elements, {size(PEAKS[1])} with {BUCKETS[1]:,}, {EACH:.2f} bytes for each element more",
        "false",
        ("tests/engine/test_claims.py::test_a_bucket_counts_elements", "ZR265"),
    ),
    Claim(
        "max_live_parameters sets the peak",
        "stage3_max_live_parameters limits how much of the model is whole on a GPU, and so the peak",
        "DeepSpeed 0.19.8 uses it to stop fetching ahead, and for nothing else (partitioned_param_coordinator.py): "
        "without "
        "prefetching it limits nothing. What lets go of parameters is stage3_max_reuse_distance",
        f"{parameters(result('knobs')['groups']['max_live']['parameters'])} parameters, two CPU processes, from 0 to "
        f"10⁹: "
        f"with a prefetch bucket larger than the model the simulated peak goes from {size(LIVE_PEAK[0])} to "
        f"{size(LIVE_PEAK[1])} and the bytes sent from {size(LIVE[0])} to {size(LIVE[1])}; stage3_max_reuse_distance "
        f"does as "
        f"much without prefetching, {size(REUSE_PEAK[0])} to {size(REUSE_PEAK[1])} and {size(REUSE[0])} to "
        f"{size(REUSE[1])} ([the knobs](knobs.md))",
        "depends",
        ("tests/unit/test_sweep.py::test_the_page_of_the_knobs_says_what_was_measured",
         CLAIMS_TEST + "test_live_parameters_only_limit_the_prefetcher"),
    ),
    Claim(
        "comments in the ds_config",
        "a ds_config may explain its keys by // comments",
        "JSON has no comments, and accelerate reads the file by json.load",
        "json.load ends on the first one; `check` names file, line and column",
        "false",
        (CLAIMS_TEST + "test_comments_are_no_json", "ZR203"),
    ),
    Claim(
        "train_batch_size by hand",
        "train_batch_size 128 with micro batches of 2 and accumulation 16 is launched on 8 GPUs",
        f"2 x 16 x 8 = {2 * 16 * 8}: DeepSpeed asserts that the product is the global batch; 128 is right for 4 GPUs",
        'refused before anything is loaded; "auto" is always right',
        "false",
        (CONTRADICT, "ZR264"),
    ),
    Claim(
        "the activation_checkpointing block",
        "the block activation_checkpointing of the ds_config recomputes activations",
        "it configures deepspeed.checkpointing, which a model has to call itself; models of transformers call torch's",
        "a warning; the recipe's `activation_checkpointing: true` does it",
        "false",
        (CONTRADICT, "ZR218"),
    ),
    Claim(
        "aio.thread_count",
        "aio.thread_count sets the threads of NVMe",
        "the key is intra_op_parallelism (DeepSpeed 0.19.8, runtime/swap_tensor/aio_config.py)",
        "a warning; DeepSpeed's own parser drops it",
        "false",
        (CLAIMS_TEST + "test_aio_reads_no_thread_count", "ZR219"),
    ),
    Claim(
        "1,000 steps of warm-up",
        "a schedule of the ds_config warms up for 1,000 steps of 100,000, in a run of 234",
        f"three epochs of 10,000 rows in batches of 128 are {3 * (10_000 // 128)} steps: the full learning rate is "
        f"never "
        "reached",
        "a schedule that is longer than the run is refused",
        "false",
        (CONTRADICT, "ZR217"),
    ),
    Claim(
        "memory_status with reset_max",
        "deepspeed.runtime.utils.memory_status(reset_max=True) watches memory without harm",
        "it resets torch's peak, which everything else that reports a peak then reads too low",
        "no GPU here to show it; a run measures phases itself (metrics.json, memory_phases) and resets "
        "once, before its first step",
        "false",
        (CLAIMS_TEST + "test_memory_status_resets_the_peak",),
    ),
)  # fmt: skip

CHECKPOINTS = (
    Claim(
        "the gather flag frees the GPU count",
        "with stage3_gather_16bit_weights_on_model_save a run goes on with another number of GPUs",
        "it gathers the 16-bit weights of the saved model. Masters, moments and the schedule stay cut for the old "
        "number",
        f"`zero-recipes reshard` cuts them anew: {len(PAIRS['pairs'])} pairs of stage and world size go on within "
        f"{PAIRS['largest_relative_loss_difference']:.0e} of the uninterrupted run's losses",
        "false",
        ("tests/engine/test_reshard.py::test_losses_go_on_as_if_nothing_had_happened", "ZR720"),
    ),
    Claim(
        "save_checkpoint on rank 0 alone",
        "rank 0 alone calls engine.save_checkpoint",
        "every rank writes its own part, and the call begins with a barrier (DeepSpeed 0.19.8, runtime/engine.py)",
        "two processes, rank 0 alone calls: it waits in the barrier until its process group's timeout; nothing is "
        "written",
        "false",
        ("tests/engine/test_claims.py::test_saving_on_rank_0_alone_hangs",),
    ),
)

CHOOSING = (
    Claim(
        "FSDP is for less than 100B",
        "FSDP is right for models below 100 billion parameters, DeepSpeed above",
        f"both cut all states over all GPUs, 16Ψ/N: 100 billion on 64 GPUs take {staircase(100 * B, 64, (3,))} under "
        f"either. "
        "No formula has such a border",
        f"two CPU processes, {FSDP['fsdp2']['parameters']:,} parameters: FSDP2 {size(FSDP['fsdp2']['state_bytes'])} "
        f"of states, "
        f"ZeRO-3 {size(FSDP['zero3']['state_bytes'])}, the same losses in fp32 ([fsdp.md](fsdp.md)). What decides is "
        f"offload, "
        "long accumulation and resharding, which ZeRO has here. Speed at that size needs GPUs",
        "false",
        ("tests/engine/test_fsdp.py::test_it_shards_and_its_bytes_are_those_counted_by_hand",),
    ),
    Claim(
        "a stage by parameter count",
        "below 10B DDP or stage 1, below 50B stage 2, below 200B stage 3, above 500B Infinity",
        f"what fits follows from bytes, GPUs and batch: 10 billion under DDP take {staircase(10 * B, 1, (0,))} on "
        f"every GPU, "
        f"50 billion at stage 2 on 8 GPUs {staircase(50 * B, 8, (2,))}",
        "simulated: " + said_and_found("pythia-2.8b", 2, "a100-40gb") + " for 2.8 billion, said to fit under DDP",
        "false",
        (SCENARIOS,),
    ),
    Claim(
        "rules of thumb for 7B, 13B and 70B",
        "13B on 2 x 80 GB and on 8 x 40 GB: stage 2; 70B on 8 x 80 GB: stage 3; 7B on 2 x 40 GB: stage 2 or 3",
        f"states alone: 13B {staircase(13 * B, 2, (2,))} and {staircase(13 * B, 8, (2,))}, 70B "
        f"{staircase(70 * B, 8, (3,))}, "
        f"7B {staircase(7 * B, 2, (2, 3))} a GPU",
        f"simulated: 13B on two, {said_and_found('13b', 2, 'a100-80gb')}; 13B on eight, "
        f"{said_and_found('13b', 8, 'a100-40gb')}; "
        f"70B, {said_and_found('70b', 8, 'a100-80gb')}; 7B, {said_and_found('2-7b', 2, 'a100-40gb')}. No card has "
        f"shown it",
        "false",
        (SCENARIOS,),
    ),
    Claim(
        "stage 3 is FSDP",
        "stage 3 and FSDP are the same",
        "the same cut and the same collectives, 16Ψ/N and 3Φ; they differ in precision, copies and what stays gathered",
        f"communication in Φ: FSDP2 {FSDP['fsdp2']['communication_in_phi']:.2f}, ZeRO-3 "
        f"{sent('stage 3, nothing kept')} where nothing stays gathered, {FSDP['zero3']['communication_in_phi']:.2f}Φ "
        f"with a "
        "model this small",
        "true in the limit",
        ("tests/engine/test_fsdp.py::test_its_collectives_are_two_gathers_and_a_reduction_in_bf16",),
    ),
    Claim(
        "2,000 steps are half an epoch",
        "2,000 steps of micro batch 4, accumulation 2 on two GPUs are half an epoch of Alpaca, in 15 to 30 minutes on "
        "two "
        "B200",
        f"2,000 x 4 x 2 x 2 rows of {ROWS:,}: {2000 * 16 / ROWS:.2f} of an epoch",
        "the time needs two B200",
        "needs a GPU",
        (CLAIMS_TEST + "test_the_page_is_what_the_sources_say",),
    ),
)
