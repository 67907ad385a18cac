"""Run a script of another project as `python SCRIPT ARGS` would, and write down every loss it goes back from.

    python -m benchmarks.real_scripts.worker LOSSES_FOLDER SCRIPT ARGS

Random numbers begin with the same seed in every process, for scripts that set none. `{rank}` in an argument
becomes the worker's rank, for scripts that would write one file from all workers.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.real_scripts import vision


def run(folder: str, script: str, arguments: Sequence[str]) -> None:
    """Run the script in this process."""
    rank = os.environ.get("RANK", "0")
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    vision.install()
    losses: list[float] = []
    backward: Any = torch.Tensor.backward

    def record_and_go_back(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(float(loss.detach().double().mean()))
        backward(loss, *args, **kwargs)

    torch.Tensor.backward = record_and_go_back  # type: ignore[assignment]
    sys.argv = [script, *(argument.replace("{rank}", rank) for argument in arguments)]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
