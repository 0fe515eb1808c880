"""`zero-recipes evaluate`: a saved model and its base on the tasks of lm-eval, side by side in evaluations.json."""

import argparse
import importlib.util
import logging
from typing import Any

import transformers

from zero_recipes import ask
from zero_recipes.config.recipe import choose_device
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import library_error_as_finding, refusal
from zero_recipes.core.tables import print_columns, terminal
from zero_recipes.metrics import schema
from zero_recipes.metrics.read_runs import EVALUATED, EVALUATIONS, TaskScore, read_evaluations
from zero_recipes.training.card import write_card

Scores = dict[tuple[str, str], TaskScore]  # by task and metric; of one model, as `after`


def evaluate(arguments: argparse.Namespace) -> int:
    """The verb. Raises Refusal before any weight is loaded. Rows of other tasks stay in the file."""
    if importlib.util.find_spec("lm_eval") is None:
        raise refusal("ZR904")
    from lm_eval.tasks import TaskManager

    for name in ("lm_eval", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    target = ask.find_target(arguments.model, arguments.base, [], arguments.trust_remote_code)
    tokenizer = ask.load_tokenizer(target)
    with library_error_as_finding("reading the tasks of lm-eval"):
        manager = TaskManager(include_path=arguments.include_path and str(arguments.include_path))
        manager.load(arguments.tasks)

    def score(loaded: ask.Loaded) -> Scores:
        with loaded.ready(), library_error_as_finding(f"evaluating {', '.join(arguments.tasks)}"):
            return _scores(loaded, arguments, manager)

    before, after = ask.base_and_model(target, tokenizer, choose_device(use_cpu=False), score)
    for key, row in (before or {}).items():
        after[key] = after[key].model_copy(update={"before": row.after, "before_stderr": row.after_stderr})
    file = (arguments.output_dir or target.folder) / EVALUATIONS
    rows = [row for row in read_evaluations(file) if row.task not in {task for task, _ in after}] + [*after.values()]
    write_json(file, [row.model_dump() for row in rows])
    if file.parent == target.folder and (target.folder / schema.FILE).is_file():
        write_card(target.folder)
    print_columns(EVALUATED[:2], EVALUATED[2:], [*after.values()], terminal())
    print(f"before: {target.base or 'no base'}, after: {target.folder}", f"written: {file}", sep="\n")
    return 0


def _scores(loaded: ask.Loaded, arguments: argparse.Namespace, manager: Any) -> Scores:
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.models.huggingface import HFLM

    evaluator.get_git_commit_hash = str  # in lm-eval 0.4.13 git's: "fatal: not a git repository" outside of one
    found = simple_evaluate(
        HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=arguments.batch_size),
        tasks=arguments.tasks,
        task_manager=manager,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        apply_chat_template=arguments.apply_chat_template,
        log_samples=False,
    )
    rows = {}
    for task, results in found["results"].items():
        counts = found["n-samples"].get(task, {})
        for name, value in results.items():
            metric, _, variant = name.partition(",")  # "acc,none" or, with a filter, "exact_match,strict-match"
            if not isinstance(value, (int, float)) or metric.endswith("_stderr") or not variant:
                continue
            error = results.get(f"{metric}_stderr,{variant}")
            rows[task, name] = TaskScore(
                task=task,
                metric=name.removesuffix(",none"),
                rows=counts.get("effective"),
                shots=found["n-shot"].get(task),
                after=value,
                after_stderr=error if isinstance(error, (int, float)) else None,
            )
    return rows
