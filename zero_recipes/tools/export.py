"""`zero-recipes export`: merged safetensors and GGUF files.

llama.cpp's own converter writes GGUF.
Each GGUF file's answers are compared with transformers'.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers

from zero_recipes.checkpoint.checksums import add_records, write_checksums
from zero_recipes.checkpoint.saved_model import compare_with_class
from zero_recipes.config.command_line import named_on
from zero_recipes.core.findings import finding, refusal
from zero_recipes.core.folder_lock import LOCK, held
from zero_recipes.core.run_end import RunFailed
from zero_recipes.metrics import schema
from zero_recipes.metrics.read_runs import SampleRow, read_samples
from zero_recipes.model.towers import auto_class, processor_files
from zero_recipes.tools import ask, losses
from zero_recipes.training.card import write_card

CONVERTER = "convert_hf_to_gguf.py"
# of merging: the largest difference of logits over the largest logit
BOUND = 1e-4
BOUND_OF_16_BITS = 0.05
# of a comparison with transformers
PROMPTS = 8
PROMPT = "Tell me a short story."  # of a model without samples
TOKENS = 32  # of an answer
# what an adapter on quantized weights is merged into
DEQUANTIZED = "dequantized"
BASE = "base"
MERGES = {DEQUANTIZED: "dequantized weights that it was trained on", BASE: "base model before it was quantized"}
PLACES = 4096


class NotExported(RunFailed):
    """A file was not made, or merging changed the model."""


def export(arguments: argparse.Namespace) -> int:
    """Write a run's model for other programs, and compare its answers. Returns the exit code.

    Raises Refusal before anything is written, and NotExported where what was written is not the run's model.
    """
    transformers.utils.logging.disable_progress_bar()
    target = ask.find_target(arguments.model, arguments.base, arguments.overrides, arguments.trust_remote_code)
    # "." and ".." have no name of their own
    folder = target.folder if target.folder.name.strip(".") else target.folder.resolve()
    out = arguments.output_dir or folder.with_name(f"{folder.name}-export")
    with held(out, "export"):
        return _export_into(out, arguments, target)


def _export_into(out: Path, arguments: argparse.Namespace, target: ask.Target) -> int:
    if any(path.name != LOCK for path in out.iterdir()):
        raise refusal("ZR902", out=out)
    if arguments.merge_into == DEQUANTIZED and not target.is_quantized:
        raise refusal("ZR907", model=arguments.model)
    merge_into = arguments.merge_into or (DEQUANTIZED if target.is_quantized else BASE)
    tokenizer = ask.load_tokenizer(target)
    llama_cpp = _find_converter(arguments.llama_cpp) if arguments.gguf else None
    texts = read_samples(target.folder / ask.SAMPLES)[:PROMPTS] or [SampleRow(prompt=PROMPT, scores_before={})]
    rows = None
    if "sample_prompts" in named_on(arguments.overrides, ()):
        questions = ask.read_questions(target, tokenizer)
        prompts = [sample.prompt for sample in questions]
        rows = losses.of_samples(questions)
    else:
        prompts = [row.prompt for row in texts]
    rows = rows or losses.rows_at_hand(target.settings, target.recipe.path, tokenizer, texts)
    model = ask.load(target, tokenizer, "cpu")
    loss_of_run = losses.mean_loss(model, tokenizer, rows)
    if target.is_quantized:
        del model  # memory need not hold both
        model = ask.load(target, tokenizer, "cpu", merge_into=merge_into)
        print(f"merging into the {MERGES[merge_into]}", flush=True)
    model = _merged(model, target, tokenizer, prompts[0])
    _agree_on_the_end(model, tokenizer, target)
    _untie_what_differs(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in _processor_files(model, target):
        shutil.copy(file, out)
    compare_with_class(out, arguments.trust_remote_code)
    write_checksums(out)
    if (target.folder / schema.FILE).is_file():
        write_card(target.folder, out)
        add_records(out)
    print(f"written: {out}, {str(model.dtype).removeprefix('torch.')}", flush=True)
    del model
    _compare_losses(out, tokenizer, rows, loss_of_run, target, merge_into)
    files = [_convert(llama_cpp, kind, out) for kind in arguments.gguf]
    print(f"\nvllm serve {out}")
    if files:
        _compare(files, answers_of(out, tokenizer, prompts), tokenizer.bos_token)
    return 0


def _processor_files(model: Any, target: ask.Target) -> list[Path]:
    """Those of the run's folder, else those of its base. A run of an earlier version has copied none."""
    own = processor_files(model.config, str(target.folder))
    if own or target.base is None:
        return own
    return processor_files(model.config, target.base)


def _merged(model: Any, target: ask.Target, tokenizer: Any, prompt: str) -> Any:
    """Raises NotExported if merging changes the logits."""
    if not target.is_adapter:
        return model
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        before = model(input_ids=ids).logits.float()
        merged = model.merge_and_unload(safe_merge=True)
        after = merged(input_ids=ids).logits.float()
    gap = ((after - before).abs().max() / before.abs().max()).item()
    bound = BOUND if merged.dtype == torch.float32 else BOUND_OF_16_BITS
    print(f"merged: logits differ by {gap:.1e} of the largest logit (limit {bound:g})", flush=True)
    if not gap <= bound:  # nor NaN
        raise NotExported(f"Merging {target.folder} changed the model: logits differ by {gap:.1e} of the largest.")
    return merged


def _untie_what_differs(model: Any) -> None:
    """A trained LM head beside the embedding that it was tied to: from_pretrained would tie them again."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is not None and model.config.tie_word_embeddings and not torch.equal(head.weight, embedding.weight):
        model.config.tie_word_embeddings = False


def _compare_losses(
    out: Path, tokenizer: Any, rows: losses.LossRows, expected: float, target: ask.Target, merge_into: str
) -> None:
    """Print the loss of the run's model and that of the files in `out`.

    Raises NotExported if they differ, unless the user has chosen to merge into other weights than were trained on.
    """
    trust = target.settings.trust_remote_code
    model = _read_again(out, "auto", trust)
    loss = losses.mean_loss(model, tokenizer, rows)
    shown = f"{expected:.4f} of the run's model, {loss:.4f} of {out.name} ({loss - expected:+.4f})"
    print(f"loss on {len(rows.samples)} rows of {rows.source}: {shown}", flush=True)
    if losses.is_close(loss, expected, model.dtype):
        return
    if target.is_quantized and merge_into == BASE:
        print(finding("ZR908", loss=loss, expected=expected, model=target.folder), file=sys.stderr, flush=True)
    else:
        losses_differ = f"its loss is {loss:.4f}, and that of the run's model {expected:.4f}"
        raise NotExported(f"{out} is not to be used: {losses_differ}.")


def _read_again(out: Path, dtype: Any, trust_remote_code: bool = False) -> Any:
    """The model in `out`, as anybody would load it."""
    config = transformers.AutoConfig.from_pretrained(out, trust_remote_code=trust_remote_code)
    return auto_class(config).from_pretrained(out, dtype=dtype, trust_remote_code=trust_remote_code).eval()


def _agree_on_the_end(model: Any, tokenizer: Any, target: ask.Target) -> None:
    """Set the chat template and end tokens to save."""
    if not tokenizer.chat_template and target.settings.dataset_format == "alpaca":
        tokenizer.chat_template = (resources.files("zero_recipes.data") / "alpaca.jinja").read_text()
    ends = {tokenizer.eos_token_id}
    known = model.generation_config.eos_token_id
    ends.update(known if isinstance(known, list) else [known])
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<<answer>>"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        tail = text.rpartition("<<answer>>")[2]
        for token in tokenizer(tail, add_special_tokens=False)["input_ids"]:
            if token in tokenizer.all_special_ids:
                ends.add(token)
                break
    ends.discard(None)
    model.generation_config.eos_token_id = sorted(ends)


# GGUF


def _find_converter(folder: Path | None) -> Path:
    """llama.cpp's folder. Raises Refusal before anything is written."""
    missing = [name for name in ("xllamacpp", "sentencepiece") if importlib.util.find_spec(name) is None]
    if folder is None or not (folder / CONVERTER).is_file():
        missing.append(f"--llama_cpp with the folder of {CONVERTER}")
    if missing:
        raise refusal("ZR903", missing=", ".join(missing))
    return folder


def _convert(llama_cpp: Path, kind: str, out: Path) -> Path:
    """The model in `out` as GGUF beside it."""
    file = out / f"{out.name}-{kind}.gguf"
    command = [sys.executable, "-m", "zero_recipes.tools.convert", llama_cpp / CONVERTER, out]
    command += ["--outfile", file, "--outtype", kind]
    places = [str(llama_cpp), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=own, text=True, capture_output=True)
    if done.returncode:
        last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise NotExported(f"llama.cpp's {CONVERTER} failed: {last_line}. Files written before are complete.")
    print(f"written: {file}, {file.stat().st_size:,} bytes", flush=True)
    return file


def answers_of(out: Path, tokenizer: Any, prompts: list[str]) -> dict[str, list[int]]:
    """What transformers answers in fp32: {prompt: greedy tokens}."""
    model = _read_again(out, torch.float32)
    found = {}
    for prompt in prompts:
        has_start = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=not has_start)["input_ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        found[prompt] = answer[0, ids.shape[1] :].tolist()
    return found


def served_tokens(file: Path, prompts: Iterable[str], start: str | None) -> list[list[int]]:
    """What llama.cpp answers: the greedy tokens of each prompt. `start`: the token that it adds itself."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx = PLACES
    parameters.n_gpu_layers = 0
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    answers = []
    for prompt in prompts:
        question = {"prompt": prompt.removeprefix(start or ""), "n_predict": TOKENS, "temperature": 0, "n_probs": 1}
        answer = server.handle_completions(question)["choices"][0]
        answers.append([token["id"] for token in answer["logprobs"]["content"]])
    return answers


def _compare(files: Iterable[Path], expected: dict[str, list[int]], start: str | None) -> None:
    """Compare each file's answers with transformers'. Raises NotExported if a 16-bit file's begin otherwise.

    A token that is nearly as likely may win in other bits, and the rest of its answer differs.
    """
    for file in files:
        equal = 0
        first = 0
        for tokens, wanted in zip(served_tokens(file, expected, start), expected.values(), strict=True):
            equal += tokens == wanted
            first += tokens[:1] == wanted[:1]
        count = len(expected)
        print(f"{file.name}: {equal} of {count} greedy answers match transformers, {first} in their first token")
        if not first and file.name.endswith("f16.gguf"):
            raise NotExported(
                f"{file} is not to be used: none of its {count} answers begins as transformers' does. llama.cpp reads "
                f"the tokens or weights otherwise. {file.parent} itself is complete."
            )
