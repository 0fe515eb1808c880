"""push_to_hub against a stub of the hub: a push that fails loses nothing and hangs no rank; no path leaves."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from huggingface_hub import ModelCard, constants

from tests.helpers.tiny import ROOT, write_recipe
from tests.unit.test_metrics import OK_ROW
from zero_recipes.checkpoint.verify import verify
from zero_recipes.training import card

pytestmark = pytest.mark.launch


class Hub(BaseHTTPRequestHandler):
    """What create_repo and create_commit ask of the hub, every file sent within the commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.answers.wait(60)
        if self.path.endswith("/repos/create"):
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
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.answers, server.files, server.refuses = threading.Event(), {}, True
    server.answers.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.answers.set()
    server.shutdown()


def test_a_hub_that_never_answers_ends_a_push_and_a_full_model_has_a_card(hub, tmp_path, monkeypatch):
    row = OK_ROW | {"loss_history": [2.5, 2.0, 1.5], "eval_history": [{"step": 3, "loss": 1.75}]}
    (tmp_path / "metrics.json").write_text(json.dumps(row))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(card, "HUB_SECONDS", 0.5)
    hub.refuses = False
    hub.answers.clear()
    with pytest.raises(card.NotPushed, match="timed out"):
        card.push(tmp_path, "me/taught", "x")
    hub.answers.set()
    assert card.push(tmp_path, "me/taught", "x") == f"{hub.address}/me/taught/commit/1"
    pushed = ModelCard(hub.files["README.md"].decode())
    assert (pushed.data.library_name, pushed.data.base_model) == ("transformers", OK_ROW["model"])
    assert "(all weights)" in pushed.text and "| 3 | 1.7500 |" in pushed.text and "planned" in pushed.text
    assert "![Loss by step](loss.png)" in pushed.text and hub.files["loss.png"].startswith(b"\x89PNG")


def test_a_push_that_fails_loses_nothing_and_no_path_leaves(hub, tmp_path):
    recipe = write_recipe(
        tmp_path, save_model=True, push_to_hub=True, hub_model_id="me/taught", hub_token="hf_secret", use_peft=True,
        lora_r=4, lora_target_modules=["query_key_value", "dense"], sample_prompts=2, sample_max_new_tokens=2,
        save_strategy="steps", save_steps=2, random_weights=False, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    with_weights = "from transformers import AutoModelForCausalLM as M, AutoConfig as C; import sys; p = sys.argv[1]; "
    with_weights += "M.from_config(C.from_pretrained(p)).save_pretrained(p)"
    subprocess.run([sys.executable, "-c", with_weights, str(tmp_path / "model")], check=True)
    out = tmp_path / "taught"
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(ROOT / "run_sft.py"), str(recipe), "--output_dir", str(out), "--deepspeed"]
    done = subprocess.run(
        [*command, str(ROOT / "ds_configs/zero2.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode and "was not pushed to me/taught" in done.stderr, done.stderr[-3000:]
    assert json.loads((out / "metrics.json").read_text())["status"] == "ok" and verify(out)
    assert not hub.files

    hub.refuses = False
    again = [sys.executable, "-m", "zero_recipes.cli.main", "push", str(out), "--hub_model_id", "me/taught"]
    done = subprocess.run(again, env=environment | {"HF_TOKEN": "x"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "metrics.json"} < hub.files.keys()
    assert not [name for name in hub.files if name.startswith(("checkpoint-", "training_args", "failure"))]
    for name, content in hub.files.items():
        assert str(tmp_path).encode() not in content and b"hf_secret" not in content, name
    assert yaml.safe_load(hub.files["recipe.resolved.yaml"])["model_name_or_path"] == "model"
    pushed = ModelCard(hub.files["README.md"].decode())
    assert (pushed.data.library_name, pushed.data.base_model) == ("peft", None)
    losses = json.loads((out / "metrics.json").read_text())["loss_history"]
    assert f"| 3 | {losses[-1]:.4f} |" in pushed.text and "zero2 on 2 x cpu" in pushed.text
