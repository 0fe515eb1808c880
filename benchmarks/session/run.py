"""run_sft.py, which leaves in its folder what the card holds beside torch's allocator after training: beside.json."""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from zero_recipes.training.trainer import ZeroSFTTrainer  # noqa: E402

sample_after = ZeroSFTTrainer.sample_after


def look(self) -> None:
    free, total = torch.cuda.mem_get_info()
    held = {"total_bytes": total, "free_bytes": free, "reserved_now_bytes": torch.cuda.memory_reserved()}
    Path(self.args.output_dir, "beside.json").write_text(json.dumps(held))
    sample_after(self)


ZeroSFTTrainer.sample_after = look
runpy.run_path(str(ROOT / "run_sft.py"), run_name="__main__")
