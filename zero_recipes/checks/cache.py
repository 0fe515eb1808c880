"""Checks of the caches: what an offline run needs is there, and a rented pod keeps what it has downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host_limits import Host
from zero_recipes.data.load import on_hub, packaged_formats

VOLUME = "/workspace"  # where RunPod mounts a pod's volume, unless its template says otherwise
FETCH = "zero-recipes fetch RECIPE.yaml, with a connection; then start again."


def offline_findings(settings: Settings) -> Iterator[Finding]:
    """What the recipe names on the hub and the cache does not hold, where the run may not ask the hub."""
    import datasets
    from huggingface_hub import constants

    if constants.is_offline_mode() and on_hub(settings.model_name_or_path):
        missing = missing_of_model(settings)
        if missing:
            yield finding(
                "ZR613",
                model_name_or_path=settings.model_name_or_path,
                missing=missing,
                hf_hub_cache=constants.HF_HUB_CACHE,
                fetch=FETCH,
            )
    if datasets.config.HF_HUB_OFFLINE:
        for entry in settings.datasets or [{"path": settings.dataset_name, "name": settings.dataset_config}]:
            if not _dataset_is_cached(entry):
                yield finding(
                    "ZR614", path=entry["path"], hf_datasets_cache=datasets.config.HF_DATASETS_CACHE, fetch=FETCH
                )


def volume_findings(settings: Settings, output_dir: Path, host: Host) -> Iterator[Finding]:
    """On a RunPod pod with a volume: caches and results outside of it are gone once the pod stops."""
    from huggingface_hub import constants

    if "RUNPOD_POD_ID" not in host.environment or not host.is_mount(VOLUME):
        return
    folders = {"the Hugging Face cache": constants.HF_HUB_CACHE} if on_hub(settings.model_name_or_path) else {}
    folders["output_dir"] = output_dir
    for what, folder in folders.items():
        place = Path(folder).resolve()
        if not place.is_relative_to(VOLUME):
            yield finding(
                "ZR615",
                what=what,
                folder=folder,
                volume=VOLUME,
                fix=f"export HF_HOME={VOLUME}/cache/huggingface"
                if what != "output_dir"
                else f"--output_dir {VOLUME}/...",
            )


def missing_of_model(settings: Settings) -> str | None:
    """The first thing that the cache lacks of a model of the hub: "config.json", weights; None if it is whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(settings.model_name_or_path, revision=settings.model_revision, local_files_only=True)
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return "snapshot of it"
    if not (folder / "config.json").is_file():
        return "config.json"
    return None if settings.random_weights else _missing_weights(folder)


def _missing_weights(folder: Path) -> str | None:
    for whole in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        if (folder / whole).is_file():
            break
    else:
        whole = "pytorch_model.bin.index.json"
        if not (folder / whole).is_file():
            return "weights"
    if not whole.endswith(".index.json"):
        return None
    shards = sorted(set(json.loads((folder / whole).read_text())["weight_map"].values()))
    return next((shard for shard in shards if not (folder / shard).is_file()), None)


def _dataset_is_cached(entry: Mapping[str, Any]) -> bool:
    """Whether `load_dataset` finds it without the hub: its own way of finding is asked, and no row is read."""
    from datasets import load_dataset_builder
    from datasets.utils.logging import set_verbosity_error, set_verbosity_warning

    if not on_hub(entry.get("path")) or entry["path"] in packaged_formats():
        return True
    set_verbosity_error()  # it warns that it could not ask the hub
    try:
        load_dataset_builder(**{key: entry.get(key) for key in ("path", "name", "data_dir", "data_files")})
        return True
    except (OSError, ValueError, KeyError):  # not there (ConnectionError is an OSError), or a broken dataset_info.json
        return False
    finally:
        set_verbosity_warning()
