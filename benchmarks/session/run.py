"""run_sft.py in a session: it waits for its turn before it trains, and leaves beside.json, what the card then holds
beside torch's allocator."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.session.turns import in_its_way, wait_for_turn  # noqa: E402
from zero_recipes.training.trainer import ZeroSFTTrainer  # noqa: E402

train, sample_after = ZeroSFTTrainer.train, ZeroSFTTrainer.sample_after


def train_in_turn(self, *arguments, **keywords):
    wait_for_turn()
    return train(self, *arguments, **keywords)


def look(self) -> None:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        held = {"total_bytes": total, "free_bytes": free, "reserved_now_bytes": torch.cuda.memory_reserved()}
        Path(self.args.output_dir, "beside.json").write_text(json.dumps(held))
    sample_after(self)


ZeroSFTTrainer.train = train_in_turn
ZeroSFTTrainer.sample_after = look
with in_its_way():
    runpy.run_path(str(ROOT / "run_sft.py"), run_name="__main__")
