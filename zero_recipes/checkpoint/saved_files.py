"""What stands beside the weights of a saved model: the checksums of all that was saved, the tokenizer, its ids."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_recipes.checkpoint import checksums
from zero_recipes.checkpoint.documents import first_fault, read_json
from zero_recipes.checkpoint.weights import NotWhole
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import first_line

CHECKSUMS = "checksums.json"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
_SAVED = ("*.safetensors", "*.index.json", "*config.json", "tokenizer*", "vocab*", "merges.txt", "spiece.model")
_SAVED += ("special_tokens_map.json", "added_tokens.json", "chat_template*")


class _Checksums(BaseModel):
    model_config = ConfigDict(strict=True)
    algorithm: Literal["sha256"]
    files: dict[Annotated[str, Field(pattern=r"^[^/]+$")], Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


def write_checksums(folder: Path) -> None:
    """checksums.json: SHA-256 of the weights, configurations and tokenizer that stand in the folder."""
    paths = sorted({path for pattern in _SAVED for path in folder.glob(pattern) if path.is_file()})
    with ThreadPoolExecutor(checksums.THREADS) as pool:
        digests = list(pool.map(checksums.sha256, paths))
    files = {path.name: digest for path, digest in zip(paths, digests, strict=True)}
    write_json(folder / CHECKSUMS, {"algorithm": "sha256", "files": files})


def compare_checksums(folder: Path) -> None:
    """Every file is what was saved, where that was written down. Raises NotWhole."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    try:
        expected = _Checksums.model_validate(read_json(path)).files
    except ValidationError as error:
        raise NotWhole(f"{path} cannot be read: {first_fault(error)}") from error
    except ValueError as error:
        raise NotWhole(f"{path} cannot be read: {error}") from error
    wrong = checksums.different(folder, expected, sorted(expected), checksums.sha256)
    if wrong is not None:
        how = "is not what was saved: its SHA-256 is another" if (folder / wrong).is_file() else "is not there"
        raise NotWhole(f"{folder} is not whole: {wrong} {how}. If that is meant, delete {path}.")


def check_tokenizer(folder: Path, config: Any, trust_remote_code: bool) -> list[str]:
    """What is worth knowing of the tokenizer and the ids in the configurations. `config`: transformers' of the model.

    Raises NotWhole where the tokenizer cannot be read, or the token that ends a text is none of the model's.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    ends = {f"config.json's eos_token_id {end}": end for end in _ids(config.eos_token_id)}
    ends |= {f"generation_config.json's eos_token_id {end}": end for end in _generation_ends(folder)}
    notes = []
    if any((folder / name).is_file() for name in _TOKENIZER):
        tokenizer = _tokenizer(folder, trust_remote_code)
        ends |= {f"the tokenizer's end {tokenizer.eos_token!r}, id {end}": end for end in _ids(tokenizer.eos_token_id)}
        if rows is not None and len(tokenizer) > rows:
            notes.append(f"its tokenizer has {len(tokenizer):,} tokens, the model {rows:,} rows for them")
    else:
        notes.append("no tokenizer stands beside it")
    beyond = [what for what, end in ends.items() if rows is not None and not 0 <= end < rows]
    if beyond:
        raise NotWhole(f"{folder} is not whole: {beyond[0]} is beyond its {rows:,} tokens. No text would end.")
    return notes


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        empty = not tokenizer("a b c 1 2 3 .")["input_ids"]
    except Exception as error:  # the library's parsers raise what they like; tokenizers a bare Exception
        raise NotWhole(f"{folder} is not whole: its tokenizer cannot be read: {first_line(error)}") from error
    if empty:
        raise NotWhole(f"{folder} is not whole: its tokenizer knows no tokens; one of its files is missing")
    return tokenizer


def _generation_ends(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        return _ids(read_json(path).get("eos_token_id"))
    except (ValueError, AttributeError) as error:
        raise NotWhole(f"{path} cannot be read: {error}") from error


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, int) and not isinstance(each, bool)]
