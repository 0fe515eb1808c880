"""Whether the hub can be reached: asked once, for seconds. A library that is not told so retries for a minute."""

from __future__ import annotations

import contextlib
import os
import threading

from huggingface_hub import constants, get_session

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.data.load import on_hub, packaged_formats

PROBE_SECONDS = 5.0


def offline_where_unreachable(settings: Settings) -> list[Finding]:
    """As if HF_HUB_OFFLINE were set, from here on, where the recipe needs the hub and it does not answer.

    At most one finding, a warning.
    """
    if constants.is_offline_mode() or not any(map(_asked_for, _names(settings))) or _answers():
        return []
    import datasets

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return [finding("ZR430", endpoint=constants.ENDPOINT, probe_seconds=PROBE_SECONDS, scope="machine")]


def _names(settings: Settings) -> list[str | None]:
    return [settings.model_name_or_path, *([entry["path"] for entry in settings.datasets] or [settings.dataset_name])]


def _asked_for(name: str | None) -> bool:
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
