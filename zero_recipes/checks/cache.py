"""The hub and its caches: does it answer, is all there that an offline run needs, does a pod keep what it downloads?"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.core.host import Host
from zero_recipes.data.load import on_hub, packaged_formats

VOLUME = "/workspace"  # where RunPod mounts a pod's volume, unless its template says otherwise
PROBE_SECONDS = 5.0


def offline_where_unreachable(settings: Settings) -> list[Finding]:
    """As if HF_HUB_OFFLINE were set, from here on, where the recipe needs the hub and it does not answer.

    At most one finding, a warning.
    """
    if constants.is_offline_mode() or not any(map(_needs_hub, _names(settings))) or _answers():
        return []
    import datasets

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return [finding("ZR430", endpoint=constants.ENDPOINT, probe_seconds=PROBE_SECONDS, scope="machine")]


def _names(settings: Settings) -> list[str | None]:
    return [settings.model_name_or_path, *([entry["path"] for entry in settings.datasets] or [settings.dataset_name])]


def _needs_hub(name: str | None) -> bool:
    return on_hub(name) and name not in packaged_formats()


def _answers() -> bool:
    """Whether anything is answered: an error of the hub's is an answer too."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever the client raises, there is no answer
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no limit of its own
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()


def offline_findings(settings: Settings) -> Iterator[Finding]:
    """What the recipe names on the hub and the cache does not hold, where the run may not ask the hub."""
    import datasets

    if constants.is_offline_mode() and on_hub(settings.model_name_or_path):
        missing = missing_of_model(settings)
        if missing:
            model = settings.model_name_or_path
            yield finding("ZR613", model=model, missing=missing, cache=constants.HF_HUB_CACHE)
    if datasets.config.HF_HUB_OFFLINE:
        for entry in settings.datasets or [{"path": settings.dataset_name, "name": settings.dataset_config}]:
            if not _dataset_is_cached(entry):
                yield finding("ZR614", path=entry["path"], cache=datasets.config.HF_DATASETS_CACHE)


def volume_findings(settings: Settings, output_dir: Path, host: Host) -> Iterator[Finding]:
    """On a RunPod pod with a volume: caches and results outside of it are gone once the pod stops."""
    if "RUNPOD_POD_ID" not in host.environment or not host.is_mount(VOLUME):
        return
    folders = {"the Hugging Face cache": constants.HF_HUB_CACHE} if on_hub(settings.model_name_or_path) else {}
    folders["output_dir"] = output_dir
    for what, folder in folders.items():
        if not Path(folder).resolve().is_relative_to(VOLUME):
            yield finding("ZR615", what=what, folder=folder, volume=VOLUME)


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
