"""Preflight: every finding at once, with its line; ds_configs from elsewhere run or are refused, with their fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.tiny import write_recipe
from zero_recipes.checks import ds_config_findings, recipe_findings
from zero_recipes.checks.preflight import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import keys
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import launched_environment, launcher_findings
from zero_recipes.core.findings import Refusal


def findings_of(path: Path, *overrides: str, environment: dict[str, str] | None = None):
    return preflight(path, recipes.read_recipe_file(path), list(overrides), environment or {})[1]


def test_all_findings_come_at_once_with_their_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    path = tmp_path / "bad.yaml"
    path.write_text(
        "model_name_or_path: ./tiny_world/base\ntorch_dtype: bfloat16\nsave_strategy: no\nlearning_rate: [1e-5]\n"
        "output_dir: 2024\nnum_machines: 2\nlerning_rate: 1e-5\nglobal_batch_size: 7\nlogging_steps: many\n"
    )
    assert cli.main(["check", str(path), "--config_file", "accelerate_configs/zero3.yaml"]) == 2
    said = capsys.readouterr().out
    lines = said.splitlines()
    for line, code, word in (
        (2, "ZR101", "`dtype`"),
        (3, "ZR106", '"no"'),
        (4, "ZR107", "learning_rate"),
        (5, "ZR107", "text"),
        (6, "ZR102", "num_processes"),
        (7, "ZR103", "`learning_rate`"),
        (9, "ZR107", "'many'"),
    ):
        (number,) = [n for n, text in enumerate(lines) if text.endswith(f"[{code}]") and f"bad.yaml:{line} " in text]
        assert word in "\n".join(lines[number : number + 3])
    assert "[ZR121]" in said
    assert "`learning_rate`" in said and "global_batch_size 7" in said
    assert said.count("refused: ") == said.count("    why: ") == said.count("   fix: ") == 9
    assert "[ZR504]" in said  # and it names no data
    assert said.endswith("9 errors, 0 warnings\n")


def test_a_sound_recipe_has_no_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    argv = [
        "check",
        "recipes/tiny.yaml",
        "--config_file",
        "accelerate_configs/zero2.yaml",
        "--output_dir",
        str(tmp_path),
    ]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert said.startswith("strategy      zero2") and said.endswith("0 errors, 0 warnings\n")


def test_what_trl_accepts_is_accepted(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        'learning_rate: 1e-5\nreport_to: [wandb, tensorboard]\neval_strategy: "no"\nwarmup_steps: 0.1\n'
        "pad_to_multiple_of: 8\nlr_scheduler_kwargs: {num_cycles: 2}\nmodel_init_kwargs: {use_cache: false}\n"
        "neftune_noise_alpha: 5\nbf16: true\npacking: true\nlora_target_modules: all-linear\nmax_length: null\n"
        "resume_from_checkpoint: true\nsample_prompts: [a, b]\ndeepspeed: {zero_optimization: {stage: 1}}\n"
    )
    types = keys.key_types()
    assert (
        recipe_findings(
            "r.yaml",
            recipes.read_recipe_file(path),
            recipes.read_recipe_file(path).lines,
            types,
            keys.key_choices(),
        )
        == []
    )
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    assert recipe.settings.learning_rate == 1e-5


def test_an_old_name_that_is_still_taken_is_said_once_and_runs(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("gradient_checkpointing: false\nmodel_name_or_path: x\n")
    (finding,) = [f for f in findings_of(path, "--output_dir", str(tmp_path / "o")) if f.key]
    assert (finding.code, finding.level) == ("ZR104", "warning") and "`activation_checkpointing`" in finding.fix
    assert recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings.gradient_checkpointing is False


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("max_steps: 5\nseed: 1\nmax_steps: 7\n")
    with pytest.raises(Refusal, match=r"lines 1 and 3") as caught:
        recipes.read_recipe_file(path)
    assert caught.value.codes == ["ZR126"]


def test_renamed_keys_are_unknown_today_and_their_new_names_known():
    known = keys.key_types()
    for old, new in ((old, row.get("to")) for old, row in keys.tables()["renamed"].items()):
        assert old not in known, f"{old} is taken again: remove it from keys.yaml"
        assert not new or new in known


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What is found in ds_configs/zero2.json with changes, in a run of 2 x 4 x 2 sequences: (code, what)."""
    path = write_recipe(
        tmp_path_factory.mktemp("said"), gradient_accumulation_steps=4, max_steps=100, max_grad_norm=1.0
    )
    settings = recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings
    sound = json.loads(Path("ds_configs/zero2.json").read_text())

    def findings(change, device="cpu", without=(), **changes):
        config = {key: value for key, value in (sound | change).items() if key not in without}
        found = ds_config_findings(config, "c.json", settings.replace(**changes), 2, device)
        return [(finding.code, finding.what) for finding in found]

    return findings


@pytest.mark.parametrize(
    "key",
    ["zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"],
)
def test_a_ds_config_that_leaves_out_what_the_run_needs(said, key):
    without = (key, "train_batch_size") if key.startswith("train") else (key,)
    assert ("ZR213", f"c.json has no {key}") in said({}, without=without, max_grad_norm=0.5)


def test_a_ds_config_may_leave_out_what_the_libraries_set_by_themselves(said):
    """DeepSpeed clips at 1.0, the recipe's default; accelerate adds the recipe's precision."""
    assert said({}, without=("gradient_clipping", "bf16", "fp16")) == []
    assert [code for code, _ in said({}, without=("gradient_clipping",), max_grad_norm=0.0)] == ["ZR213"]
    stage_3 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    assert said(stage_3) == [] and "has no bf16" in said(stage_3, without=("bf16",))[0][1]


def test_ds_configs_that_contradict_the_run(said):
    assert said({}) == said({"train_batch_size": 16}) == []
    assert said({"bf16": {"enabled": True}}) == said({}, device="cuda", fp16=True, bf16=False) == []
    for changes, code, named in (
        ({"train_batch_size": 32}, "ZR214", "train_batch_size=32, the run has train_batch_size (calculated)=16"),
        ({"fp16": {"enabled": True}}, "ZR214", "fp16.enabled=True"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "ZR214", "optimizer.params.lr=0.5"),
        ({"scheduler": {"params": {"warmup_num_steps": 1000}}}, "ZR217", "warmup_num_steps 1000"),
        ({"activation_checkpointing": {}}, "ZR218", "activation_checkpointing"),
        ({"aio": {"thread_count": 4}}, "ZR219", "aio.thread_count"),
        ({"gradient_cliping": 1.0}, "ZR220", "gradient_cliping"),
    ):
        found, what = said(changes)[0]
        assert found == code and named in what
    assert [code for code, _ in said({}, fp16=True, bf16=False)] == ["ZR215"]


def test_accelerate_files_that_contradict_themselves(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 2\n"
        "  deepspeed_config_file: ds_configs/zero3.json\n"
    )
    environment = launched_environment(path, None)
    (finding,) = launcher_findings(environment)
    assert (
        environment["WORLD_SIZE"] == "4" and finding.code == "ZR303" and "zero_stage, mixed_precision" in finding.what
    )
    for name in ("zero1", "ddp"):
        assert list(launcher_findings(launched_environment(Path("accelerate_configs") / f"{name}.yaml", 3))) == []


@pytest.mark.parametrize(
    "text, said",
    [
        ("num_processes: 2\n", "A `distributed_type` must be specified"),
        ("distributed_type: MULTI_GPU\nnum_process: 2\n", "unknown keys (['num_process'])"),
        ("distributed_type: multi_gpu\n", "'multi_gpu' is not a valid DistributedType"),
        ("- 2\n", "has no attribute"),
        ("distributed_type: FSDP\nfsdp_config: 2\n", "fsdp_config is no mapping"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
         "ec2_instance_type: a\niam_role_name: b\n", "SageMaker"),
    ],
)  # fmt: skip
def test_what_accelerate_cannot_launch_is_no_accelerate_file(tmp_path, text, said):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(Refusal) as refused:
        launched_environment(tmp_path / "a.yaml", None)
    assert refused.value.codes == ["ZR306"] and said in refused.value.why
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\n")
    assert launched_environment(tmp_path / "a.yaml", 3)["WORLD_SIZE"] == "3"


@pytest.mark.parametrize(("stage", "loss_scale", "found"), [(0, 0, True), (0, 512, True), (0, 1, False), (1, 0, False)])
def test_fp16_is_refused_at_the_stage_whose_loss_is_not_scaled(said, stage, loss_scale, found):
    config = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": "auto", "loss_scale": loss_scale}}
    in_fp16 = [code for code, _ in said(config, device="cuda", fp16=True, bf16=False)]
    assert in_fp16 == (["ZR271"] if found else [])
    assert "ZR271" not in [code for code, _ in said(config, device="cuda")]
