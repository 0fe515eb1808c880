"""`zero-recipes check`: all findings about a run, before it costs money."""

import argparse
import json
import re
import shlex

from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import collected, downgraded, finding, ignored_codes, shown
from zero_recipes.core.host import gpu_named, gpus
from zero_recipes.core.process import local_world_size
from zero_recipes.core.tables import terminal, working
from zero_recipes.engine.warnings import quieten

TRUST = "trust_remote_code"
NOT_RUN = re.compile(r"trust_remote_code|contains custom code")  # a library's words for code it did not run


def check(arguments: argparse.Namespace) -> int:
    with working("importing the libraries"):
        from zero_recipes.checks import predicted
        from zero_recipes.checks.preflight import preflight, resolved_ds_config
        from zero_recipes.config.accelerate import file_findings, file_named, launched_as_named, launched_environment

    quieten()
    mapping = recipes.recipe_in_force(arguments.recipe)
    overrides = list(arguments.overrides)
    leaves_code_out = False
    if TRUST not in recipes.named_on(overrides, [TRUST]):
        # a look at a stranger's recipe runs no code of its model
        overrides += [f"--{TRUST}", "false"]
        leaves_code_out = bool(mapping.get(TRUST))
    launch_file = arguments.config_file
    if launch_file is None and arguments.num_processes is None:
        launch_file = file_named(mapping)
        environment = launched_as_named(mapping)
    else:
        environment = launched_environment(launch_file, arguments.num_processes)
    gpu = gpu_named(arguments.gpu, gpus()) if arguments.gpu else None
    with working(f"checking {arguments.recipe}"):
        run, findings = preflight(arguments.recipe, mapping, overrides, environment, rehearsal=True, gpu=gpu)
        if run is not None:
            findings += predicted.rehearsed(run, environment, gpu)
    if leaves_code_out:
        findings = [found for found in findings if found.level != "error" or not NOT_RUN.search(found.why)]
        findings.append(finding("ZR783"))
    if launch_file is not None:
        findings += file_findings(launch_file)
    if run is not None and arguments.data:
        audited: list = []
        with collected(audited):
            audited += data_findings(run)
        findings += [found for found in audited if found not in findings]
    errors = sum(found.level == "error" for found in findings)
    warnings = len(findings) - errors
    answer = "cannot run" if errors else "can run"
    if gpu:
        answer += f" on {gpu.name}"
    print(f"{arguments.recipe} {answer}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    if findings:
        print(shown(findings, arguments.traceback))
    if run is not None:
        print(*run.described(), sep="\n")
        if arguments.show:
            print(json.dumps(resolved_ds_config(run), indent=2) if run.strategy.is_deepspeed else "no DeepSpeed")
        if not errors:
            launch = _launch_command(arguments, run, environment)
            print(f"\nfirst, with a small model: {rehearsal_of(launch, run.strategy.world_size)}\n{launch}")
    return 2 if errors else 0


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _launch_command(arguments: argparse.Namespace, run, environment) -> str:
    recipe = str(arguments.recipe)
    count = run.strategy.world_size
    file = ["--config_file", str(arguments.config_file)] if arguments.config_file else []
    if local_world_size(environment, count) == count:
        launch = ["zero-recipes", "train", recipe, *file, "--num_processes", str(count)]
    else:  # several machines
        launch = ["accelerate", "launch", *file, "run_sft.py", recipe]
    return shlex.join([*launch, *arguments.overrides])


NOT_REHEARSED = (
    r"^(zero-recipes train|accelerate launch)|run_sft.py | --num_processes \d+| --hosts \S+ --machine_rank \S+"
)


def rehearsal_of(launch: str, gpus: int) -> str:
    """What to type before a launch."""
    return f"zero-recipes rehearse{re.sub(NOT_REHEARSED, '', launch)} --gpus {gpus}"


def data_findings(run) -> list:
    """Audit the training rows, and print counts and three rows. Raises Refusal."""
    from datasets import Dataset

    from zero_recipes.data import audit, load, prepare

    settings = run.settings.replace(**recipes.WITHOUT_LAUNCH)
    training_args = recipes.trl_arguments(settings, run.recipe.path).training
    data = prepare.read_data(settings, load.load_tokenizer(settings))
    splits, findings = prepare.prepare_splits(data, settings, training_args)
    if isinstance(data.evaluation, Dataset):  # of a stream only the beginning was read
        findings += audit.left_out_findings(splits[1].ready, settings, run.strategy.replicas)
    train = splits[0]
    for line in prepare.recognised(data, train):
        print(f"recognized    {line}")
    print(train.audit)
    audit.show_rows(prepare.shown_rows(data, train, training_args, settings.assistant_mask), terminal())
    return downgraded(findings, ignored_codes(settings.ignore))
