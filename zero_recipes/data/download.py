"""Download a recipe's model and data once, before anything is timed."""

from __future__ import annotations

from pathlib import Path

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, refusal

# what a run reads: configuration, tokenizer and safetensors weights
WANTED = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "*.py"]
FALLBACK = [*WANTED, "*.bin"]  # repositories that have no safetensors


def fetch(settings: Settings) -> list[tuple[str, int | None]]:
    """[(what, bytes on disk)] of the model, the data and the kernel of flash attention that a recipe names. Local
    folders are only measured; None of a kernel that cannot be fetched here, with the reason.

    Raises Refusal where the hub cannot be reached or does not have what the recipe names.
    """
    return [_fetch_model(settings), *_fetch_data(settings), *_fetch_kernel(settings)]


def _fetch_model(settings: Settings) -> tuple[str, int]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, revision = settings.model_name_or_path, settings.model_revision
    if name is None:
        raise refusal("ZR520")
    if Path(name).is_dir():
        return name, _size(Path(name))
    try:
        files = HfApi().list_repo_files(name, revision=revision)
        patterns = WANTED if any(file.endswith(".safetensors") for file in files) else FALLBACK
        patterns = ["config.json", "*token*", "*.model", "*.jinja", "*.py"] if settings.random_weights else patterns
        return name, _size(Path(snapshot_download(name, revision=revision, allow_patterns=patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise refusal("ZR521", name=name, error=first_line(error)) from error


def _fetch_data(settings: Settings) -> list[tuple[str, int]]:
    from zero_recipes.data.load import load_splits

    dataset = load_splits(settings, settings, _mixture(settings))
    files = {file["filename"] for split in dataset.values() for file in split.cache_files}
    named = settings.dataset_name or ", ".join(d["path"] for d in settings.datasets)
    return [(named, sum(Path(file).stat().st_size for file in files))]


def _fetch_kernel(settings: Settings) -> list[tuple[str, int | None]]:
    """The build for this machine's torch: one fetched without a GPU is none of a machine that has one, and is named."""
    from zero_recipes.libs import attention

    kernel = attention.kernel_of(settings.attn_implementation)
    if kernel is None or attention.has_package(settings.attn_implementation):
        return []
    wanted = attention.wanted_kernels()
    if wanted is not None:
        return [(f'{kernel} is not fetched: pip install "{wanted}" first', None)]
    try:
        return [(kernel, _size(attention.download(kernel, only_cached=False)))]
    except LookupError as error:
        return [(f"{kernel} is not fetched, the run itself will look for it: {error}", None)]


def _mixture(settings: Settings):
    from trl import DatasetMixtureConfig

    return DatasetMixtureConfig(
        datasets=list(settings.datasets), streaming=settings.streaming, test_split_size=settings.test_split_size
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
