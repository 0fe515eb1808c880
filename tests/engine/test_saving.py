"""A saved model is whole under every strategy and the trained one; a checkpoint is as large as predicted."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.conftest import STRATEGIES
from tests.helpers import cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, arguments, llama_config, weights_apart, write_recipe, write_rows
from zero_recipes.checkpoint import checksums
from zero_recipes.checks.capacity import checkpoint_bytes, read_at_resume
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.run import Run
from zero_recipes.config.strategy import Strategy
from zero_recipes.model.meta import MetaModel
from zero_recipes.tools.verify import verify


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_and_samples_are_those_of_the_trained_one(trained, strategy):
    folder = trained(strategy).folder
    assert verify(folder, deep=True)["parameters"] == trained(strategy).metrics["parameters"]
    assert verify(folder / "checkpoint-6", deep=True), "its pickles hold data alone"
    known = checksums.read_checksums(folder)
    written = {path.name for path in folder.iterdir() if path.is_file()}
    assert written == {*known["files"], *known["records"], checksums.CHECKSUMS}, "no file that its checksums lack"
    assert weights_apart(folder, trained("zero1").folder) < 1e-2  # bf16 rounds to 4e-3
    losses = [[entry["loss"] for entry in trained(name).metrics["eval_history"]] for name in (strategy, "zero1")]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=2e-3)
    mine, wanted = (trained(name).metrics["loss_history"] for name in (strategy, "zero1"))
    assert mine == pytest.approx(wanted, rel=1e-3 if strategy.startswith("zero") else 1e-2) and mine[-1] < mine[0] - 0.1
    texts = [(trained(name).folder / "samples.jsonl").read_text() for name in (strategy, "zero1")]
    rows, others = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert len(rows) == 3
    for row, other in zip(rows, others, strict=True):
        for key in ("scores_before", "scores_after"):
            assert row[key]["reference_loss"] == pytest.approx(other[key]["reference_loss"], rel=1e-2)
        assert set(row) == {"prompt", "before", "after", "reference", "scores_before", "scores_after", "errors"}
        assert set(row["scores_after"]) == {"exact_match", "token_f1", "reference_loss"}
        assert row["scores_after"]["reference_loss"] < row["scores_before"]["reference_loss"]


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero2"), "zero3"])
def test_the_best_model_is_the_one_that_is_saved(two, tmp_path, strategy):
    """A learning rate that spoils the model: the run stops early, and the best checkpoint is what is saved."""
    keys = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    keys |= {
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
        "learning_rate": 3.0,
        "warmup_steps": 2,
        "bf16": False,
    }
    keys |= {"dataset_name": str(write_rows(tmp_path / "few", count=20))}
    path, out = write_recipe(tmp_path, save_model=True, **keys), tmp_path / "out"
    metrics = two.run(cases.train, argv=arguments(path, strategy, out))[0]["metrics"]
    losses = [evaluation["loss"] for evaluation in metrics["eval_history"]]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 9, losses
    assert (metrics["best_step"], metrics["stopped_early_at"]) == (best, len(losses)) and metrics["status"] == "ok"
    folders = (out, out / f"checkpoint-{best}", out / f"checkpoint-{len(losses)}")
    ours, wanted, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert not torch.equal(ours["embed_out.weight"], last["embed_out.weight"])
    said = f"the model is that of the best checkpoint: {out / f'checkpoint-{best}'} (eval_loss {min(losses):.4g})\n"
    assert two.log(0, 10**6).count(said) == 1


@pytest.mark.parametrize("strategy", [grid("zero1"), "zero2", "zero3", grid("zero2_offload")])
def test_a_real_checkpoint_is_as_large_as_predicted(trained, strategy):
    run, stage = trained(strategy), int(strategy[4])
    launched = Strategy(strategy, 2, DsConfig({"zero_optimization": {"stage": stage}}), "c.json")
    written = [p for p in (run.folder / "checkpoint-6").rglob("*") if p.suffix in (".safetensors", ".pt")]
    settings = parse_recipe(run.recipe, recipes.read_recipe_file(run.recipe), []).settings
    psi = run.metrics["parameters"]
    fp16 = SimpleNamespace(dtype=torch.float16)
    predicted = checkpoint_bytes(Run(None, settings, {}, launched, "cpu", {}, MetaModel(fp16, settings)), psi, 2)
    assert predicted < sum(p.stat().st_size for p in written) < 1.1 * predicted + 100_000
    states = [path.stat().st_size for path in run.folder.glob("checkpoint-6/global_step*/*_states.pt")]
    read = read_at_resume(2 * psi, 12 * psi, stage, 2)
    assert read < max(states) < 1.1 * read + 100_000, "of the files that each process reads one after another"


@pytest.mark.parametrize("strategy", [*map(grid, ("ddp", "zero0", "zero1", "zero3")), "zero2", "fsdp2"])
def test_a_tied_head_is_saved_once(two, tmp_path, strategy):
    """Of the model in output_dir and of a checkpoint; DeepSpeed and FSDP2 gather copies of the one tensor."""
    torch.manual_seed(5)
    keys = {"random_weights": False, "save_model": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    path = write_recipe(tmp_path, bf16=False, **keys)
    AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    two.run(cases.train, argv=arguments(path, strategy, tmp_path / "out"))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == before.keys() and "lm_head.weight" not in saved
        assert verify(folder)["tensors"] == len(before)
    assert not torch.equal(saved["model.embed_tokens.weight"], before["model.embed_tokens.weight"]), "it has trained"


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def new_tokens(tmp_path_factory):
    """A recipe of an adapter on a Llama with the chat template of another tokenizer: TRL adds its tokens, trains their
    embeddings, and the LM head as a whole."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(folder / "tokenizer")
    turns = [
        [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "moss " * i}] for i in range(1, 9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    keys = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"], "bf16": False}
    keys |= {"chat_template_path": str(folder / "tokenizer"), "max_steps": 2, "random_weights": False}
    keys |= {"dataset_name": str(folder / "rows.jsonl"), "dataset_format": None, "save_model": True}
    path = write_recipe(folder, **keys, max_grad_norm=0.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama_config(vocab_size=size)).save_pretrained(folder / "model")
    return path


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero2"), "fsdp2"])
def test_an_adapter_with_new_tokens_has_each_weight_once(two, new_tokens, tmp_path, strategy):
    """And is what it was for PEFT, which reads no more of it than this."""
    argv = arguments(new_tokens, strategy, tmp_path / "out")
    two.run(cases.train, argv=argv)
    left_out = "zero_recipes.engine.faults.trained_modules_saved_twice.trained_modules_saved_once"
    two.run(cases.train, argv=arguments(new_tokens, strategy, tmp_path / "peft"), left_out=left_out)
    saved, by_peft = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "peft"))
    size = len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    ends = {name for name in saved if "layers" not in name}
    embedding = "base_model.model.model.embed_tokens.token_adapter"
    wanted = {
        f"{embedding}.base_layer.weight",
        f"{embedding}.trainable_tokens_delta",
        "base_model.model.lm_head.weight",
    }
    assert ends == wanted and saved["base_model.model.lm_head.weight"].shape[0] == size
    assert {"base_model.model.lm_head.modules_to_save.weight"} < by_peft.keys() - saved.keys(), "PEFT: remove the patch"
    logits = []
    for name in ("out", "peft"):
        base = AutoModelForCausalLM.from_pretrained(new_tokens.parent / "model", dtype=torch.float32)
        base.resize_token_embeddings(size, mean_resizing=False)
        logits.append(PeftModel.from_pretrained(base, tmp_path / name)(torch.arange(2, 40)[None]).logits)
    assert torch.equal(*logits)
