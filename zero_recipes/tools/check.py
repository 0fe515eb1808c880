"""`zero-recipes check`: all findings about a run, before it costs money."""

import argparse
import json
import re
import shlex

from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import downgraded, finding, ignored_codes, shown
from zero_recipes.core.host import gpu_named, gpus
from zero_recipes.core.process import local_world_size
from zero_recipes.core.tables import terminal, working
from zero_recipes.engine.warnings import quieten


def check(arguments: argparse.Namespace) -> int:
    with working("importing the libraries"):
        from zero_recipes.checks import predicted
        from zero_recipes.checks.preflight import preflight, resolved_ds_config
        from zero_recipes.config.accelerate import file_findings, file_named, launched_as_named, launched_environment

    quieten()
    mapping = recipes.read_recipe_file(arguments.recipe)
    overrides = list(arguments.overrides)
    trusts = "trust_remote_code"
    recipe = str(arguments.recipe)
    is_named = any(word.lstrip("-").replace("-", "_").startswith(trusts) for word in overrides)
    overrides += [] if is_named else [f"--{trusts}", "false"]  # a look at a stranger's recipe runs no code of its model
    remote_code = bool(mapping.get(trusts)) and not is_named
    launch_file = arguments.config_file
    if launch_file is None and arguments.num_processes is None:
        launch_file, environment = file_named(mapping), launched_as_named(mapping)
    else:
        environment = launched_environment(launch_file, arguments.num_processes)
    gpu = gpu_named(arguments.gpu, gpus()) if arguments.gpu else None
    with working(f"checking {arguments.recipe}"):
        run, findings = preflight(arguments.recipe, mapping, overrides, environment, rehearsal=True, gpu=gpu)
        findings += [] if run is None else predicted.rehearsed(run, environment, gpu)
    if remote_code:  # what says no more than that this code was not run has no place of its own
        without = re.compile(r"trust_remote_code|contains custom code")
        findings = [found for found in findings if found.level != "error" or not without.search(found.why)]
        findings.append(finding("ZR783"))
    findings += [] if launch_file is None else file_findings(launch_file)
    findings += data_findings(run) if run is not None and arguments.data else []
    errors = sum(finding.level == "error" for finding in findings)
    answer = f"{'cannot' if errors else 'can'} run{f' on {gpu.name}' if gpu else ''}"
    counts = {"error": errors, "warning": len(findings) - errors}
    print(f"{recipe} {answer}:", ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items()))
    if findings:
        print(shown(findings, arguments.traceback))
    if run is not None:
        print("\n".join(run.strategy.described(run.device, run.settings)))
        if run.strategy.ds.quantizes_gradients and not (errors or remote_code):
            print(gradients_described(run, environment))
        if arguments.show:
            print(json.dumps(resolved_ds_config(run), indent=2) if run.strategy.is_deepspeed else "no DeepSpeed")
    if run is not None and not errors:
        file = ["--config_file", str(arguments.config_file)] if arguments.config_file else []
        launch, count = ["accelerate", "launch", *file, "run_sft.py", recipe], run.strategy.world_size
        if local_world_size(environment, count) == count:  # not several machines
            launch = ["zero-recipes", "train", recipe, *file, "--num_processes", str(count)]
        print("", shlex.join([*launch, *arguments.overrides]), sep="\n")
    return 2 if errors else 0


def gradients_described(run, environment) -> str:
    """How much of them qgZ leaves as it is; of an adapter's, if there is one."""
    from peft import get_peft_model

    from zero_recipes.engine.patches import share_not_quantized
    from zero_recipes.model import adapter_config, build_on_meta, load_config

    model, adapter = build_on_meta(load_config(run.settings)), adapter_config(run.settings)
    model = model if adapter is None else get_peft_model(model, adapter)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    share = share_not_quantized(shapes, run.strategy, local_world_size(environment, run.strategy.world_size))
    return f"gradients     {share:.1%} not quantized between nodes"


def data_findings(run) -> list:
    """What the audit of the training rows finds. Prints their counts and three of them. Raises Refusal."""
    from zero_recipes.data import audit, load, prepare

    # neither weights nor ranks: the strategy does not matter to the data
    settings = run.settings.replace(deepspeed=None, use_cpu=True, bf16=False, fp16=False, ddp_backend=None)
    training_args = recipes.trl_arguments(settings, run.recipe.path).training
    data = prepare.read_data(settings, load.load_tokenizer(settings))
    splits, findings = prepare.prepare_splits(data, settings, training_args)
    for line in prepare.recognised(data, splits[0]):
        print(f"recognized    {line}")
    print(splits[0].audit)
    audit.show_rows(prepare.shown_rows(data, splits[0], training_args), terminal())
    return downgraded(findings, ignored_codes(settings.ignore))
