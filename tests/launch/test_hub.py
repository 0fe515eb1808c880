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
from huggingface_hub import ModelCard

from tests.helpers.tiny import ROOT, write_recipe
from zero_recipes.checkpoint.verify import verify

pytestmark = pytest.mark.launch


class Hub(BaseHTTPRequestHandler):
    """What create_repo and create_commit ask of the hub, every file sent within the commit."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
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
    server.asked, server.files, server.refuses = [], {}, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


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
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.library_name, card.data.base_model) == ("peft", None)
    losses = json.loads((out / "metrics.json").read_text())["loss_history"]
    assert f"| 3 | {losses[-1]:.4f} |" in card.text and "zero2 on 2 x cpu" in card.text
