"""The command line of zero-recipes."""

import subprocess
import sys

import pytest

from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.verbs import VERBS

WITHOUT_LIBRARIES = """
import sys
from zero_recipes.tools.main import main
try:
    main(["--help"])
except SystemExit:
    print(sorted({"torch", "transformers", "trl", "datasets"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_of_each_subcommand_names_its_options(capsys, verb):
    with pytest.raises(SystemExit) as ended:  # a stray % in a help text is a ValueError
        parse_arguments([verb.name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert ("override the recipe's keys" in " ".join(shown.split())) == verb.takes_overrides


def test_help_waits_for_no_library():
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_option_is_refused_where_no_recipe_is_overridden(capsys):
    assert parse_arguments(["ask", "model", "--seed", "3"]).overrides == ["--seed", "3"]
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["verify", "model", "--seed", "3"])
    assert ended.value.code == 2
    assert "unknown arguments: --seed 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_processes", "0"], "0 is not above zero"),
        (["--num_processes", "1.5"], "invalid number value: '1.5'"),
        (["--hosts", "a,,b"], "'a,,b' has an empty name"),
        (["--num_proc", "4"], None),  # a key of the recipe: names are never abbreviated
        (["--num_processes", "1", "--hosts", "a,b"], None),
    ],
)
def test_what_an_option_takes(capsys, words, message):
    arguments = ["train", "tiny.yaml", *words]
    if message is None:
        assert parse_arguments(arguments).recipe.is_file()
    else:
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "trusts"),
    [
        (["--trust_remote_code", "model"], True),
        (["--trust_remote_code", "true", "model"], True),
        (["model", "--trust_remote_code", "False"], False),
        (["model", "--trust_remote_code=false"], False),
        (["model", "--trust-remote-code"], True),
        (["model"], False),
    ],
)
def test_the_leave_to_run_code_is_given_or_refused_as_in_a_recipe(words, trusts):
    for verb in ("ask", "verify"):
        assert parse_arguments([verb, *words]).trust_remote_code == trusts
    named = parse_arguments(["check", "tiny.yaml", "--trust_remote_code", "false"])
    assert named.overrides == ["--trust_remote_code", "false"], "a key of the recipe"
