"""What `zero-recipes rehearse` writes over a recipe: for every launch, for each, and in place of what needs a GPU."""

# of every launch: all phases come within three steps, and nothing leaves this machine
EVERY_LAUNCH = (
    "--max_steps 3 --logging_strategy steps --logging_steps 1 --eval_delay 1000 --resume_from_checkpoint false "
    "--overwrite false --skip_checksums false --push_to_hub false --report_to none "
    "--save_strategy no --save_on_signal false --save_model false --load_best_model_at_end false "
    "--early_stopping_patience null"
)

# parts of a launch's overrides; each goes over the words above and over those before it
ONE_STEP = "--max_steps 1"
SHORTER = "--max_length 2048"  # on CPUs, of longer rows: packs of 16,384 tokens take minutes a step
LONGEST_FIRST = "--train_sampling_strategy group_by_length"  # not of packs and streams
SAVES_MODEL = "--save_model true"
CHECKPOINTS = "--save_strategy steps --save_steps 2"  # not where nothing could go on from one
EVALUATES = "--eval_strategy steps --eval_delay 0 --eval_steps 1"  # where the recipe does
KEEPS_BEST = (
    "--eval_strategy steps --eval_delay 0 --eval_steps 2 --load_best_model_at_end true"  # where the recipe does
)
NO_SAMPLES = "--sample_prompts 0"
RESUMES = "--resume_from_checkpoint true"
ALONE = "--eval_strategy no --eval_on_start false"

# in order
LAUNCHES = {
    "longest": (ONE_STEP, LONGEST_FIRST, EVALUATES, NO_SAMPLES),
    "equal": (SHORTER, NO_SAMPLES, ALONE),
    "whole": (SHORTER, SAVES_MODEL, CHECKPOINTS, KEEPS_BEST),
    "killed": (SHORTER, CHECKPOINTS, NO_SAMPLES),
    "resumed": (SHORTER, CHECKPOINTS, NO_SAMPLES, RESUMES),
    "fewer": (SHORTER, NO_SAMPLES, RESUMES),  # on half the ranks
}

# {launch: {phase: its key in phase_seconds of metrics.json; launch: the launch as a whole; None: not timed}}
PHASES: dict[str, dict[str, str | None]] = {
    "longest": {"rows": "data", "model": "model", "longest rows": "train", "evaluation": "eval"},
    "equal": {"plain torch": "train"},
    "whole": {
        "samples": "eval",
        "training": "train",
        "checkpoints, model": "save",
        "verify": None,
        "schedule": None,
    },
    "killed": {"kill": "launch"},
    "resumed": {"resume": "launch"},
    "fewer": {"resume on half": "launch"},
}

# {code: the phase that it is about}, where a run is refused before that phase
PHASE_OF_CODE = {"ZR871": "evaluation"}

# Before each launch. glibc gives tensors back to the kernel and gets them again, which takes half of a CPU's step with
# 150,000 logits.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "2147483648"}
ONE_MACHINE = "--num_machines 1 --machine_rank 0 --main_process_port 0"

# recipe keys that need a GPU: values, by regular expression, and what a CPU takes; 4 and 8 bits run, by other kernels
NEED_GPU = {
    "attn_implementation": ("flash", "sdpa"),
    "load_in_4bit": ("True", "true"),
    "load_in_8bit": ("True", "true"),
    "use_liger_kernel": ("True", "false"),
    "tf32": ("True", "null"),
    "fp16": ("True", "false --bf16 true"),
    "optim": ("bit|paged", "adamw_torch"),
}
