"""`zero-recipes export`: a run's model as others take it: whole safetensors, GGUF files, a Modelfile, a line for vLLM.

LoRA is merged. GGUF is written by llama.cpp's own converter, and each file is run against transformers.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants

from zero_recipes.checkpoint.save import compare_with_class, write_checksums
from zero_recipes.core.findings import RunFailed, library_error_as_finding, refusal
from zero_recipes.data.forms import alpaca_prompt
from zero_recipes.metrics import schema
from zero_recipes.metrics.read_runs import read_samples
from zero_recipes.tools import ask
from zero_recipes.training.card import write_card

SOURCE = "llama_cpp_python-0.3.36"  # whose vendor/llama.cpp has the converter
BOUNDS = {torch.float32: 1e-4}  # of merging: the largest difference of logits as a share of the largest logit
BOUND_OF_16_BITS = 0.05
TOKENS, PROMPTS, PLACES = 32, 8, 4096  # of a comparison
LEAST_SAME = 0.5  # share of transformers' tokens, of a file in 16 bits


class NotExported(RunFailed):
    """A file could not be made, or answers otherwise than its model."""


def export(arguments: argparse.Namespace) -> int:
    """The verb. Returns the exit code; raises Refusal before anything is written."""
    transformers.utils.logging.disable_progress_bar()
    target = ask.find_target(arguments.model, arguments.base, arguments.overrides, arguments.trust_remote_code)
    folder = target.folder if target.folder.name.strip(".") else target.folder.resolve()
    out, kinds = arguments.output_dir or folder.with_name(f"{folder.name}-export"), arguments.gguf
    if out.exists() and any(out.iterdir()):
        raise refusal("ZR902", out=out)
    tokenizer = ask.load_tokenizer(target)
    for missing, fix in _missing(arguments.llama_cpp) if kinds else ():
        raise refusal("ZR903", missing=missing, fix=fix)
    llama_cpp = _source(arguments.llama_cpp) if kinds else None
    prompts = [row.prompt for row in read_samples(target.folder / ask.SAMPLES)[:PROMPTS]]
    if not prompts:
        prompts = [prompt_of(tokenizer, target.settings.dataset_format, "Tell me a short story.")]
    model = _merged(ask.load(target, tokenizer, "cpu").model, target, tokenizer, prompts[0])
    ends = _agree_on_the_end(model, tokenizer, target)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    compare_with_class(out, arguments.trust_remote_code)
    write_checksums(out)
    if (target.folder / schema.FILE).is_file():
        write_card(target.folder, out)
    print(f"written: {out}, {str(model.dtype).removeprefix('torch.')}", flush=True)
    del model
    files = [_convert(llama_cpp, kind, out) for kind in kinds]
    (out / "Modelfile").write_text(modelfile(tokenizer, files[-1].name if files else "", ends))
    answers = answers_of(out, tokenizer, prompts) if files else {}
    fine = [_compare(file, answers, tokenizer.bos_token) for file in files]
    more = f"zero-recipes export {target.folder} --gguf q8_0 --output_dir {out}-gguf  # for Ollama and llama.cpp"
    ollama = f"ollama create {out.name} -f {out / 'Modelfile'}" if files else more
    print("", ollama, f"vllm serve {out}", sep="\n")
    return 0 if all(fine) else 1


def prompt_of(tokenizer: Any, dataset_format: str | None, question: str) -> str:
    """A question as the run's rows have it: in Alpaca's prompt, by the chat template. Raises Refusal."""
    if dataset_format in ("alpaca", "alpaca_chat"):
        question = alpaca_prompt(question)
    if not tokenizer.chat_template or dataset_format == "alpaca":
        return question
    turns = [{"role": "user", "content": question}]
    with library_error_as_finding("writing a question with the model's chat template"):
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def _merged(model: Any, target: ask.Target, tokenizer: Any, prompt: str) -> Any:
    """The model without an adapter beside it. Raises NotExported where merging changes the logits."""
    if not target.is_adapter:
        return model
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        before = model(input_ids=ids).logits.float()
        merged = model.merge_and_unload(safe_merge=True)
        gap = ((merged(input_ids=ids).logits.float() - before).abs().max() / before.abs().max()).item()
    bound = BOUNDS.get(merged.dtype, BOUND_OF_16_BITS)
    print(f"merged: logits differ by {gap:.1e} of the largest logit (limit {bound:g})", flush=True)
    if target.recipe.settings.load_in_4bit or target.recipe.settings.load_in_8bit:
        print("the adapter was trained on quantized weights; it is merged into 16-bit weights", flush=True)
    if not gap <= bound:
        raise NotExported(f"Merging {target.folder} changed the model: logits differ by {gap:.1e} of the largest.")
    return merged


def _agree_on_the_end(model: Any, tokenizer: Any, target: ask.Target) -> list[str]:
    """Set chat template (of Alpaca's prompt too) and end tokens for whoever loads the folder; returns the tokens."""
    if not tokenizer.chat_template and target.settings.dataset_format == "alpaca":
        tokenizer.chat_template = (resources.files("zero_recipes.data") / "alpaca.jinja").read_text()
    known, turn = model.generation_config.eos_token_id, []
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<<answer>>"}]
        tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("<<answer>>")[2]
        turn = [t for t in tokenizer(tail, add_special_tokens=False)["input_ids"] if t in tokenizer.all_special_ids]
    ends = {tokenizer.eos_token_id, *turn[:1], *(known if isinstance(known, list) else [known])} - {None}
    model.generation_config.eos_token_id = sorted(ends)
    return tokenizer.convert_ids_to_tokens(sorted(ends))


# GGUF


def _source(folder: Path | None) -> Path:
    """llama.cpp's folder: the one named, else of the pinned source distribution in the cache. Nothing is compiled."""
    cache = Path(constants.HF_HOME) / "zero-recipes"
    if folder is None and not (cache / SOURCE).is_dir():
        name, _, version = SOURCE.rpartition("-")
        print(f"downloading the source of {name} {version} for llama.cpp's converter, 77 MB", flush=True)
        with tempfile.TemporaryDirectory() as download:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
            subprocess.run([*pip, f"{name}=={version}", "--dest", download], check=True)
            with tarfile.open(next(Path(download).glob("*.tar.gz"))) as archive:
                archive.extractall(cache, filter="data")
    return folder or cache / SOURCE / "vendor" / "llama.cpp"


def _missing(folder: Path | None) -> Iterator[tuple[str, str]]:
    """(what is missing for the files, how to fix it); first what needs no download. A model that llama.cpp's converter
    does not know is the converter's to refuse: the safetensors are written by then."""
    for name in ("xllamacpp", "sentencepiece"):
        if importlib.util.find_spec(name) is None:
            yield f"the package {name}", "pip install 'zero-recipes[gguf]'"
    llama_cpp = _source(folder)
    if not (llama_cpp / "convert_hf_to_gguf.py").is_file():
        yield f"{llama_cpp}/convert_hf_to_gguf.py", "Set --llama_cpp to a llama.cpp folder."


def _run(llama_cpp: Path, script: str, *arguments: Any) -> None:
    places = [str(llama_cpp), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "zero_recipes.tools.convert", str(llama_cpp / script), *map(str, arguments)]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=own, text=True, capture_output=True)
    if done.returncode:
        last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise NotExported(f"llama.cpp's {script} failed: {last_line}. Files written before are complete.")


def _convert(llama_cpp: Path, kind: str, out: Path) -> Path:
    """The model in `out` as GGUF beside it."""
    file = out / f"{out.name}-{kind}.gguf"
    _run(llama_cpp, "convert_hf_to_gguf.py", out, "--outfile", file, "--outtype", kind)
    print(f"written: {file}, {file.stat().st_size:,} bytes", flush=True)
    return file


def answers_of(out: Path, tokenizer: Any, prompts: list[str]) -> dict[str, list[int]]:
    """The tokens that transformers answers each prompt with, greedily, in fp32."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), {}
    for prompt in prompts:
        has_start = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=not has_start)["input_ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        found[prompt] = answer[0, ids.shape[1] :].tolist()
    return found


def served_tokens(file: Path, prompts: Iterable[str], start: str | None) -> list[list[int]]:
    """The tokens that llama.cpp answers each prompt with, greedily."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers, parameters.verbosity = str(file), PLACES, 0, 0
    server, found = xllamacpp.Server(parameters), []
    for prompt in prompts:
        question = {"prompt": prompt.removeprefix(start or ""), "n_predict": TOKENS, "temperature": 0, "n_probs": 1}
        answer = server.handle_completions(question)["choices"][0]["logprobs"]["content"]
        found.append([each["id"] for each in answer])
    return found


def _compare(file: Path, expected: dict[str, list[int]], start: str | None) -> bool:
    """Run the file on the same prompts, and say how far its answers are transformers'. False for another model's."""
    equal, same = 0, 0
    answers = served_tokens(file, expected, start)
    for tokens, wanted in zip(answers, expected.values(), strict=True):
        pairs = zip(tokens, wanted, strict=False)
        alike = next((n for n, (own, other) in enumerate(pairs) if own != other), min(len(tokens), len(wanted)))
        equal, same = equal + (tokens == wanted), same + alike
    share = same / sum(map(len, expected.values()))
    result = f"{equal} of {len(expected)} greedy answers match transformers, and {share:.0%} of the tokens"
    print(f"{file.name}: {result} up to the first difference", flush=True)
    return share >= LEAST_SAME or not file.name.endswith("f16.gguf")


# what serves it


def modelfile(tokenizer: Any, weights: str, ends: list[str]) -> str:
    """Ollama's file: one turn as the chat template writes it, in Go's language, and the end tokens."""
    template = _in_go(tokenizer) if tokenizer.chat_template else "{{ .Prompt }}"
    return "\n".join([f"FROM ./{weights}", f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{e}"' for e in ends), ""])


def _in_go(tokenizer: Any) -> str:
    """Cut out of what the template renders around the text of each role."""

    def cut(*roles: str) -> list[str]:
        turns = [{"role": role, "content": f"<<{role}>>"} for role in roles]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        pieces, rest = [], text.removeprefix(tokenizer.bos_token or "")
        for role in roles:
            piece, found, rest = rest.partition(f"<<{role}>>")
            pieces += [piece] if found else []
        return [*pieces, rest]

    before, after = cut("user")
    try:
        with_system = cut("system", "user")
    except Exception:  # of a template that takes no system text
        with_system = []
    if len(with_system) == 3:
        start, between, _ = with_system
        before = f"{{{{ if .System }}}}{start}{{{{ .System }}}}{between}{{{{ else }}}}{before}{{{{ end }}}}"
    return f"{before}{{{{ .Prompt }}}}{after}{{{{ .Response }}}}"
