"""Answers of exported GGUF files beside those of transformers: python -m benchmarks.exports

GPT-NeoX (tiny_world/base), a LoRA trained on it for a minute, and a Llama (stories260K, where ../shared/fixtures has
it). Needs the extra `gguf`, and llama-quantize on the PATH for q4_k_m. Writes results/exports.json.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from transformers import AutoTokenizer

from zero_recipes.cli import export
from zero_recipes.cli.main import main as zero_recipes
from zero_recipes.core.files import write_json
from zero_recipes.core.host import hardware_facts, library_versions
from zero_recipes.metrics.read_runs import SampleRow

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "exports.json"
NEOX, LLAMA = ROOT / "tiny_world" / "base", ROOT.parent / "shared" / "fixtures" / "stories260K"
ROWS = [json.loads(line) for line in (ROOT / "tiny_world" / "test.jsonl").read_text().splitlines()[:8]]
STORIES = ["Once upon a time", "Lily had a red ball", "The dog", "One day, a boy named Tim", "The sun", "Her mom said",
           "They played", "A big bird"]  # fmt: skip
KINDS = ["f16", "q8_0", *["q4_k_m"] * bool(shutil.which("llama-quantize"))]
TRAIN = ["--use_peft", "true", "--lora_target_modules", "all-linear", "--max_steps", "30", "--learning_rate", "1e-3",
         "--dtype", "float32", "--bf16", "false", "--overwrite", "true"]  # fmt: skip


def measured(folder: Path) -> dict[str, dict]:
    """{model: {file: share of tokens, equal answers, answers side by side}}; works within `folder`."""
    found = {"GPT-NeoX, tiny_world/base": _exported(folder / "neox", NEOX, [row["instruction"] for row in ROWS], KINDS)}
    if LLAMA.is_dir():
        found["Llama, stories260K"] = _exported(folder / "llama", LLAMA, STORIES, KINDS)
    run = [sys.executable, ROOT / "run_sft.py", ROOT / "recipes" / "tiny.yaml", *TRAIN, "--output_dir", folder / "lora"]
    subprocess.run(run, check=True, cwd=ROOT)
    found["LoRA on GPT-NeoX"] = _exported(folder / "lora", None, None, ["f16", "lora"])
    return found


def _exported(folder: Path, model: Path | None, prompts: list[str] | None, kinds: list[str]) -> dict:
    if model is not None:
        shutil.copytree(model, folder)
        rows = [SampleRow(prompt=prompt, scores_before={}).model_dump_json() + "\n" for prompt in prompts]
        (folder / "samples.jsonl").write_text("".join(rows))
    out = folder.with_name(f"{folder.name}-out")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = zero_recipes(["export", str(folder), "--gguf", *kinds, "--output_dir", str(out)])
    asked = [SampleRow.model_validate_json(line).prompt for line in (folder / "samples.jsonl").read_text().splitlines()]
    tokenizer, asked = AutoTokenizer.from_pretrained(out), list(dict.fromkeys(asked[: export.PROMPTS]))
    expected, found = export.answers_of(out, tokenizer, asked), {"exit_code": code}
    found["printed"] = [line for line in printed.getvalue().splitlines() if "greedy" in line or "merged" in line]
    for kind in (kind for kind in kinds if kind != export.LORA):
        file = out / f"{out.name}-{kind}.gguf"
        served = export.served_tokens(file, asked, tokenizer.bos_token, None)
        pairs = list(zip(asked, expected.values(), served, strict=True))
        found[kind] = {
            "bytes": file.stat().st_size,
            "equal_answers": sum(wanted == tokens for _, wanted, tokens in pairs),
            "answers": [
                {"prompt": prompt, "transformers": tokenizer.decode(wanted), "llama.cpp": tokenizer.decode(tokens)}
                for prompt, wanted, tokens in pairs
            ],
        }
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    versions = library_versions() | {"xllamacpp": version("xllamacpp")}
    about = {"command": "python -m benchmarks.exports", "converter": export.SOURCE, "most_tokens": export.TOKENS}
    write_json(RESULT, about | {"models": found, "versions": versions, "hardware": hardware_facts("cpu")})


if __name__ == "__main__":
    main()
