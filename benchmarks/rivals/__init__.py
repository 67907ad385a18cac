"""Other systems, behind one small interface, so that all are measured by the same plain loop.

```python
rival = find("ddp-fp16")
if (reason := rival.available()) is not None:
    print(f"{rival.name}: {reason}")          # shown in every table, never skipped silently
with rival.join(model, optimizer) as (model, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
```

What a system promises, and what it may expect of the caller, is said in `thinwire.bench.systems`.

An adapter is one file of less than 80 lines that states its settings as fields; thinwire never imports any.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.optim import Optimizer

from thinwire.bench.systems import Rival
from thinwire.errors import check_one_of

Joined = AbstractContextManager[tuple[nn.Module, Optimizer]]


def all_rivals() -> dict[str, Rival]:
    """Every rival by its name, with the settings of the standard benchmark."""
    from benchmarks.rivals.accelerate_local_sgd import AccelerateLocalSgd
    from benchmarks.rivals.ddp import Ddp, Fp16, PowerSgd
    from benchmarks.rivals.post_local_sgd import PostLocalSgd
    from benchmarks.rivals.torchft_diloco import TorchftDiLoCo
    from benchmarks.rivals.torchft_local_sgd import TorchftLocalSgd

    rivals: list[Rival] = [Ddp(), Fp16(), *(PowerSgd(rank=rank) for rank in (1, 2, 4))]
    rivals += [PostLocalSgd(), TorchftLocalSgd(), TorchftDiLoCo(), AccelerateLocalSgd()]
    return {rival.name: rival for rival in rivals}


def find(name: str) -> Rival:
    """The rival of this name."""
    rivals = all_rivals()
    check_one_of("rival", name, rivals)
    return rivals[name]
