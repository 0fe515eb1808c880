"""Cases of tests/helpers/group.py for the board of families: runs of run_sft.py, and what they saved, loaded again."""

import json
import traceback
from pathlib import Path

import peft
import torch
from torch import distributed
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import run_sft
from zero_recipes.core.findings import Refusal
from zero_recipes.model.towers import auto_class

LOOKED_AT = 12  # tokens


def train(argv: list[str], errors: str, reloads: bool = False) -> dict:
    """One whole run: its losses; or the codes of a refusal; or an error, which also goes to the folder `errors`.

    `reloads`: what was saved is loaded by transformers alone, and its logits compared with the trained model's.
    """
    try:
        run = run_sft.read_run(argv)
        trainer = run_sft.train(run)
        trainer.accelerator.wait_for_everyone()
        metrics = json.loads((run.output_dir / "metrics.json").read_text())
        found = {"losses": metrics["loss_history"]}
        if reloads:
            found["reloaded"] = distance_of_saved(trainer.model, run.output_dir)
        return found
    except Refusal as refusal:
        return {"refused": refusal.codes, "what": refusal.what.splitlines()[0]}
    except Exception as error:  # whatever a library raises is a cell of the board
        found = {"error": described(error)}
        (Path(errors) / f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
        return found


def described(error: BaseException) -> str:
    """An error in a line, with the place in the code that it comes from."""
    text = " ".join(str(error).split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    return f"{type(error).__name__}: {text}"[:300] + f" ({file}:{place.lineno})"


def loaded_whole(folder: str | Path) -> PreTrainedModel:
    """A model as transformers loads it, with its towers where it is a composite one."""
    config = AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, dtype=torch.float32)


def distance_of_saved(trained: PreTrainedModel, folder: Path) -> float:
    """How far the logits of a saved model lie from the trained one's, in shares of the largest."""
    tokens = torch.arange(2, 2 + LOOKED_AT)[None]
    trained.eval()
    with torch.no_grad():
        wanted = trained(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    unset_hf_deepspeed_config()  # or loading would partition the weights
    config = folder / "adapter_config.json"
    if config.is_file():
        base = json.loads(config.read_text())["base_model_name_or_path"]
        loaded = loaded_whole(base)
        loaded = peft.PeftModel.from_pretrained(loaded, folder)
    else:
        loaded = loaded_whole(folder)
    loaded.eval()
    with torch.no_grad():
        got = loaded(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
