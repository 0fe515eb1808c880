"""push_to_hub against a stub of the hub: a push that fails loses nothing and hangs no rank; no path leaves."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from huggingface_hub import ModelCard, constants, hf_api
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import ending_cases
from tests.helpers.tiny import arguments, write_recipe
from tests.unit.test_metrics import OK_ROW
from zero_recipes.checkpoint.saved_model import NotWhole
from zero_recipes.tools import main as cli
from zero_recipes.tools.verify import verify
from zero_recipes.training import card


class Hub(BaseHTTPRequestHandler):
    """What create_repo and create_commit ask of the hub, every file sent within the commit."""

    def do_GET(self):  # who the token belongs to
        return self.answer(200, {"name": "me"}) if self.server.knows_token else self.answer(401, {"error": "who?"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.answers.wait(60)
        if self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body)["name"])
            answer = {"url": f"{self.server.address}/me/taught", "id": "me/taught"}
        elif self.path.endswith("/preupload/main"):
            named = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in named]}
        elif "/commit/" in self.path:
            if self.server.refuses:
                return self.answer(403, {"error": "no write access"})
            lines = [json.loads(line) for line in body.splitlines()]
            files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            self.server.files = {name: base64.b64decode(content) for name, content in files.items()}
            answer = {"commitUrl": f"{self.server.address}/me/taught/commit/1", "commitOid": "1"}
        else:  # validate-yaml
            answer = {"warnings": [], "errors": []}
        return self.answer(200, answer)

    def answer(self, code, document):
        content = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.answers, server.files, server.refuses = threading.Event(), {}, True
    server.created, server.knows_token = [], True
    server.answers.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(hf_api.api, "endpoint", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.answers.set()
    server.shutdown()


def test_a_hub_that_never_answers_ends_a_push_and_a_full_model_has_a_card(hub, tmp_path, monkeypatch):
    row = OK_ROW | {"loss_history": [2.5, 2.0, 1.5], "eval_history": [{"step": 3, "loss": 1.75}]}
    (tmp_path / "metrics.json").write_text(json.dumps(row))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(card, "HUB_SECONDS", 0.5)
    hub.refuses = False
    hub.answers.clear()
    with pytest.raises(card.NotPushed, match="timed out"):
        card.push(tmp_path, "me/taught", "x")
    hub.answers.set()
    monkeypatch.setattr(card, "HUB_SECONDS", 60)  # however slow the machine is
    assert card.push(tmp_path, "me/taught", "x") == f"{hub.address}/me/taught/commit/1"
    pushed = ModelCard(hub.files["README.md"].decode())
    assert (pushed.data.library_name, pushed.data.base_model) == ("transformers", OK_ROW["model"])
    assert "(all weights)" in pushed.text and "planned" in pushed.text
    assert "held-out rows: 1.7500 after step 3." in pushed.text
    assert "![Loss by step](loss.png)" in pushed.text and hub.files["loss.png"].startswith(b"\x89PNG")


def test_a_push_that_fails_loses_nothing_and_no_path_leaves(hub, two, tmp_path, monkeypatch):
    recipe = write_recipe(
        tmp_path, save_model=True, push_to_hub=True, hub_model_id="me/taught", hub_token="hf_secret", use_peft=True,
        lora_r=4, lora_target_modules=["query_key_value", "dense"], sample_prompts=2, sample_max_new_tokens=2,
        save_strategy="steps", save_steps=2, random_weights=False, eval_strategy="steps", eval_steps=2,
        report_to="tensorboard", logging_steps=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    out = tmp_path / "taught"
    argv = arguments(recipe, "zero2", out)
    for ended in two.run(ending_cases.ending_at_hub, argv=argv, address=hub.address):
        assert ended["error"][0] == "NotPushed" and "was not pushed to me/taught" in ended["error"][1]
    assert ended["metrics"]["status"] == "ok" and verify(out)
    assert hub.created == ["taught"] and not hub.files
    written = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"training_args.bin", "checkpoint-2/training_args.bin", "recipe.resolved.yaml"} < written.keys()
    assert any("tfevents" in name for name in written)
    assert [name for name, content in written.items() if b"hf_secret" in content] == []

    hub.refuses = False
    monkeypatch.setenv("HF_TOKEN", "x")
    assert cli.main(["push", str(out), "--hub_model_id", "me/taught"]) == 0
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "metrics.json"} < hub.files.keys()
    assert not [name for name in hub.files if name.startswith(("checkpoint-", "training_args", "failure"))]
    for name, content in hub.files.items():
        assert str(tmp_path).encode() not in content and b"hf_secret" not in content, name
    assert yaml.safe_load(hub.files["recipe.resolved.yaml"])["model_name_or_path"] == "model"
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, content in hub.files.items():
        (downloaded / name).write_bytes(content)
    assert verify(downloaded) == verify(out), "neither what was left out nor what was redacted is an alarm"
    (downloaded / "metrics.json").write_text("{}")
    with pytest.raises(NotWhole, match=r"metrics\.json"):
        verify(downloaded)
    pushed = ModelCard(hub.files["README.md"].decode())
    assert (pushed.data.library_name, pushed.data.base_model) == ("peft", None)
    losses = ended["metrics"]["loss_history"]
    assert f"{losses[-1]:.4f} at step 3." in pushed.text and "zero2 on 2 x cpu" in pushed.text
    assert "| measured |\n" in pushed.text, "nothing was planned"


def test_a_run_that_is_refused_leaves_no_repository(hub, two, tmp_path):
    """For its rows, or where it would load the weights; and for its token before that."""
    hub_keys = {"push_to_hub": True, "hub_model_id": "me/taught", "hub_token": "hf_secret", "save_model": True}
    argv = arguments(write_recipe(tmp_path, **hub_keys), "zero2", tmp_path / "out")
    of_rows = [*argv, "--max_length", "4"]  # no answer is left
    assert "max_length" in two.run(ending_cases.ending_at_hub, argv=of_rows, address=hub.address)[0]["error"][1]
    refused = {"point": "load", "error": "Refusal", "words": "no weights", "address": hub.address}
    assert "no weights" in two.run(ending_cases.break_at, argv=argv, **refused)[1]["error"][1]
    assert hub.created == []
    hub.knows_token = False
    ended = two.run(ending_cases.ending_at_hub, argv=argv, address=hub.address)
    for rank in ended:
        assert "logging in (push_to_hub)" in rank["error"][1]
    assert not hub.created and not (tmp_path / "out").exists()
