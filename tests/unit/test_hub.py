"""A hub that does not answer is asked once; what follows is as if offline."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.helpers.fault import Side
from zero_recipes.checks import hub
from zero_recipes.cli import main as cli

HUBS = "model_name_or_path: nobody/has-this\nrandom_weights: true"


@pytest.fixture
def online(monkeypatch):
    """As on a machine that may ask the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


def test_a_silent_hub_is_said_once_and_then_left_alone(tmp_path, online, monkeypatch, capsys):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # takes connections, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
        Side(recipe=HUBS).write(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert os.environ["HF_HUB_OFFLINE"] == "1" and datasets.config.HF_HUB_OFFLINE
        said = capsys.readouterr().out
        assert said.count("[ZR430]") == 1 and said.count("[ZR613]") == 1
        assert cli.main(["check", "recipe.yaml"]) == 2
        assert "[ZR430]" not in capsys.readouterr().out, "what is offline is not asked again"


def test_a_closed_port_is_no_answer(online, monkeypatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert not hub._answers()


def test_nothing_is_asked_where_all_is_here(tmp_path, online, monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda: pytest.fail("the hub was asked"))
    Side().write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "recipe.yaml"]) == 0
