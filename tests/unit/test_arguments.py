"""The command line of zero-recipes."""

import subprocess
import sys

import pytest

from zero_recipes.core.files import FILES
from zero_recipes.tools import main as cli
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
    assert "docs/" not in shown, "a page, which a wheel does not have"


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


def test_a_folder_of_init_has_the_files_that_the_pages_name_and_a_recipe_for_own_data(tmp_path, monkeypatch, capsys):
    """The recipe runs as it is, on the demo's data; the accelerate files are found at the top."""
    assert cli.main(["init", str(tmp_path / "mine")]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    assert cli.main(["check", "my-data.yaml", "--data", "--config_file", "zero3.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "my-data.yaml can run: 0 errors" in printed
    assert "zero-recipes train my-data.yaml --config_file zero3.yaml --num_processes 2" in printed
    (tmp_path / "mine" / "my-data.yaml").write_text("seed: 1")
    assert cli.main(["init", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "my-data.yaml").read_text() == "seed: 1"


def test_files_of_the_package_are_printed_by_the_names_that_find_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "tiny.yaml", "--config_file", "zero3.yaml"]) == 0
    printed = capsys.readouterr().out
    assert str(FILES) not in printed and FILES.name not in printed
    assert "zero-recipes train tiny.yaml --config_file zero3.yaml --num_processes 2" in printed


def test_explain_lists_all_codes(capsys):
    assert cli.main(["explain", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ZR101  ") and len(lines) > 300
    assert cli.main(["explain", "ZR9"]) == 2


def test_a_pager_may_stop_to_read():
    command = [sys.executable, "-m", "zero_recipes.tools.main", "explain", "all"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1
    process.stderr.close()
