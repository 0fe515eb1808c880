"""`zero-recipes check`: all findings about a run, before it costs money."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero_recipes.core import codes
from zero_recipes.core.errors import Refusal, downgraded


def add_check(verbs) -> None:
    verb = verbs.add_parser(
        "check", help="all findings about a run, before it costs money; unknown options are overrides"
    )
    verb.add_argument("recipe", type=Path)
    verb.add_argument("--config_file", type=Path, help="the accelerate file it will be launched with")
    verb.add_argument("--num_processes", type=int)
    verb.add_argument(
        "--upgrade", action="store_true", help="write RECIPE.upgraded.yaml in today's keys, and check that"
    )
    verb.add_argument(
        "--data", action="store_true", help="tokenise the training rows, count and show what is supervised"
    )
    verb.add_argument("--show", action="store_true", help="print the DeepSpeed configuration that will be used")
    verb.set_defaults(func=_check, overrides=[])


def _check(arguments: argparse.Namespace) -> int:
    import json
    import os

    from zero_recipes.checks import recipe_code
    from zero_recipes.checks.preflight import preflight, resolved_ds_config
    from zero_recipes.compat.warnings import quieten
    from zero_recipes.config import recipe as recipes
    from zero_recipes.config.accelerate import launched_environment
    from zero_recipes.planner import gate

    quieten()
    if arguments.upgrade:
        arguments.recipe = _write_upgraded(arguments.recipe)
    before = dict(os.environ)
    mapping = recipes.read_recipe_file(arguments.recipe)
    loaders = recipe_code.take_back_loaders(os.environ, before)
    overrides = recipe_code.without_remote_code(arguments.overrides)
    remote_code = bool(mapping.get("trust_remote_code")) and len(overrides) > len(arguments.overrides)
    environment = launched_environment(arguments.config_file, arguments.num_processes)
    run, findings = preflight(arguments.recipe, mapping, overrides, environment, rehearsal=True)
    findings = [found for found in findings if not (remote_code and recipe_code.due_to_missing_code(found))]
    findings += recipe_code.recipe_code_findings(loaders, remote_code)
    if run is not None:
        findings += gate.rehearsed(run, environment)
        print("\n".join(run.strategy.described(run.device, run.settings)))
        if arguments.show:
            print(json.dumps(resolved_ds_config(run), indent=2) if run.strategy.is_deepspeed else "no DeepSpeed")
        if arguments.data:
            findings += data_findings(run, show=True)
    print(*findings, sep="\n", end="\n" if findings else "")
    errors = sum(finding.level == "error" for finding in findings)
    print(f"{errors} errors, {len(findings) - errors} warnings")
    return 2 if errors else 0


def data_findings(run, show: bool) -> list:
    """What the audit of the training rows finds; their counts and three of them printed, if asked.

    Raises Refusal where data, splits or sample prompts cannot be had.
    """
    from zero_recipes.config import recipe as recipes
    from zero_recipes.data import audit, samples, template
    from zero_recipes.data import load as data
    from zero_recipes.data import splits as data_splits

    # neither weights nor ranks: the strategy does not matter to the data
    settings = run.settings.replace(deepspeed=None, use_cpu=True, bf16=False, fp16=False)
    script_args, training_args, model_args, dataset_args, ours = recipes.instances(settings, run.recipe.path)
    tokenizer = template.apply_chat_template_file(data.load_tokenizer(model_args, training_args), training_args)
    rows, evaluation = data.load_rows(script_args, training_args, dataset_args, ours.dataset_format)
    template.refuse_bad_template(rows, tokenizer, training_args)
    samples.choose_samples(ours.sample_prompts, evaluation, ours.dataset_format, tokenizer)
    skips = (training_args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
    sources = data_splits.sources_of(script_args, dataset_args)
    splits, findings = data_splits.prepare_splits(rows, evaluation, tokenizer, training_args, skips, sources)
    if show:
        audit.show_audit(splits[0].audit, splits[0].tokenised, tokenizer, training_args)
    return downgraded(findings, codes.requested(ours.ignore))


def _write_upgraded(old: Path) -> Path:
    from zero_recipes.cli.upgrade import upgrade

    text, changes = upgrade(old)
    new = old.with_suffix(".upgraded.yaml")
    if new.exists() and new.read_text() != text:
        raise Refusal(
            "ZR127", f"{new} exists already", "It differs from what would be written.", "Move it, or delete it."
        )
    new.write_text(text)
    print(*changes, f"written: {new}", sep="\n")
    return new
