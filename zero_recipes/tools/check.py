"""`zero-recipes check`: all findings about a run, before it costs money."""

import argparse
import json
import shlex

from zero_recipes.config import recipe as recipes
from zero_recipes.config.trl_arguments import WITHOUT_LAUNCH, trl_arguments
from zero_recipes.core.files import as_typed
from zero_recipes.core.findings import collected, downgraded, finding, ignored_codes, shown
from zero_recipes.core.gpus import gpu_named, gpus
from zero_recipes.core.process import local_world_size
from zero_recipes.core.tables import terminal, working
from zero_recipes.core.units import counted
from zero_recipes.engine.warnings import quieten


def check(arguments: argparse.Namespace) -> int:
    """Print all findings about a run, and what it would be. Returns the exit code: 2 where it would be refused."""
    with working("importing the libraries"):
        from zero_recipes.checks import predicted
        from zero_recipes.checks.adapter_rules import trained_without_memory
        from zero_recipes.checks.deepspeed_objects import resolved_ds_config
        from zero_recipes.checks.preflight import preflight
        from zero_recipes.checks.schedule import length_described
        from zero_recipes.config.accelerate import file_findings, file_named, launched_as_named, launched_environment

    quieten()
    mapping = recipes.recipe_in_force(arguments.recipe)
    # a look at a stranger's recipe runs no code of its model; the last option counts
    overrides = ["--trust_remote_code", "false", *arguments.overrides]
    launch_file = arguments.config_file
    if launch_file is None and arguments.num_processes is None:
        launch_file = file_named(mapping)
        environment = launched_as_named(mapping)
    else:
        environment = launched_environment(launch_file, arguments.num_processes)
    gpu = gpu_named(arguments.gpu, gpus()) if arguments.gpu else None
    with working(f"checking {as_typed(arguments.recipe)}"):
        run, findings = preflight(arguments.recipe, mapping, overrides, environment, starts_now=False, gpu=gpu)
        if run is not None:
            findings += predicted.planned_findings(run, environment, gpu)
    if mapping.get("trust_remote_code") and run is not None and not run.settings.trust_remote_code:
        findings = [found for found in findings if not found.is_of_code_not_run]
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
    print(f"{as_typed(arguments.recipe)} {answer}: {counted(errors, 'error')}, {counted(warnings, 'warning')}")
    if findings:
        print(shown(findings, arguments.traceback))
    if run is not None:
        print(*run.strategy.described(run.device, run.settings, run.precision), sep="\n")
        trained = trained_without_memory(run)
        if trained is not None:
            print(f"{'trains':<14}{trained}")
        if not arguments.data:  # which has said more
            print(length_described(run.settings, run.strategy))
        if arguments.show:
            print(json.dumps(resolved_ds_config(run), indent=2) if run.strategy.is_deepspeed else "no DeepSpeed")
        if not errors:
            launch = _launch_command(arguments, run, environment)
            print(f"\nfirst, with a small model: {rehearsal_of(launch, run.strategy.world_size)}\n{launch}")
    return 2 if errors else 0


def _launch_command(arguments: argparse.Namespace, run, environment) -> str:
    count = run.strategy.world_size
    launch = ["zero-recipes", "train", as_typed(arguments.recipe)]
    if arguments.config_file:
        launch += ["--config_file", as_typed(arguments.config_file)]
    launch += ["--num_processes", str(count)]
    if local_world_size(environment, count) != count:
        launch += ["--hosts", "FIRST,SECOND", "--machine_rank", "RANK"]
    return shlex.join([*launch, *arguments.overrides])


NOT_REHEARSED = ("--num_processes", "--hosts", "--machine_rank")


def rehearsal_of(launch: str, gpus: int) -> str:
    """Write the rehearsal's command, to be typed before a launch (`zero-recipes train RECIPE ...`)."""
    words = iter(shlex.split(launch)[2:])
    kept = []
    for word in words:
        if word in NOT_REHEARSED:
            next(words, None)
        else:
            kept.append(word)
    return shlex.join(["zero-recipes", "rehearse", *kept, "--gpus", str(gpus)])


def data_findings(run) -> list:
    """Audit the training rows, and print counts and three rows. Raises Refusal."""
    from zero_recipes.checks.schedule import length_described, length_findings
    from zero_recipes.data import audit, load, prepare
    from zero_recipes.data.samples import with_tokens
    from zero_recipes.model.positions import refuse_unknown_tokens

    settings = run.settings.replace(**WITHOUT_LAUNCH)
    training_args = trl_arguments(settings, run.recipe.path).training
    data = prepare.read_data(settings, load.load_tokenizer(settings))
    splits, findings = prepare.prepare_splits(data, settings, training_args)
    train = splits[0]
    is_whole = train.rows is data.train  # of a stream only the beginning was read
    if is_whole:
        evaluation = splits[1].ready if len(splits) > 1 else None
        findings += audit.left_out_findings(train.ready, evaluation, settings, run.strategy.replicas)
    ours = audit.RowKeys.of(settings)
    with collected(findings):
        with_tokens(data.samples, data.tokenizer, training_args, ours)
        refuse_unknown_tokens(run.config, settings, train.audit.largest_id)
    for line in prepare.recognised(data, train):
        print(f"recognized    {line}")
    sequences = len(train.ready) if is_whole else None
    findings += length_findings(run, train.audit, sequences)
    print(train.audit)
    print(length_described(settings, run.strategy, sequences and train.audit.trained, sequences))
    audit.show_rows(prepare.shown_rows(data, train, training_args, ours), terminal())
    return downgraded(findings, ignored_codes(settings.ignore))
