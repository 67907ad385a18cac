"""Split training over Gloo processes gives the numbers of one process, for every number of groups."""

from __future__ import annotations

import functools
import os
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from tests.parallel.nets import BATCH, CASES, OPTIMIZERS, train
from tests.worlds import run_processes
from thinwire.parallel.volumes import divisors

STEPS, FEW_STEPS = 50, 8
Key = tuple[str, str, int, bool]
"""Model, optimizer, groups, and whether updates are strip-owned."""
State = dict[str, Tensor]


@functools.cache
def alone(name: str, optimizer: str, steps: int) -> State:
    """What one process makes of the whole batches."""
    model = CASES[name].model()
    train(model, OPTIMIZERS[optimizer](model), CASES[name], range(steps))
    return model.state_dict()


def every(num_workers: int) -> list[Key]:
    """Every model, optimizer and number of groups."""
    kinds = product(CASES, OPTIMIZERS, divisors(num_workers), (False, True))
    return list(kinds)


FEW: list[Key] = [("cnn", "adamw", 2, True), ("transformer", "sgd", 1, False), ("lstm", "sgd", 2, False)]


def together(keys: list[Key], num_steps: int) -> dict[Key, State]:
    """Train every combination, one after another, in one world."""
    found, workers = {}, dist.get_world_size()
    share = BATCH // workers
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for name, optimizer, groups, sharded in keys:
        case = CASES[name]
        model = case.model()
        plan = tw.parallel.hybridize(model, groups=groups, layers=case.layers)
        assert len(plan.styles) == (len(plan.layers) if groups < workers else 0)
        steps = OPTIMIZERS[optimizer](model)
        with tw.attach(model, steps, tw.AllReduce(), sharded=sharded):
            train(model, steps, case, range(num_steps), rows)
        found[name, optimizer, groups, sharded] = tw.parallel.full_state_dict(model)
    return found


def few() -> dict[Key, State]:
    """A few combinations, and what is refused in a world of several workers."""
    model = CASES["mlp"].model()
    for groups in (3, 0, 8, "2"):
        with pytest.raises(
            tw.errors.SettingError, match=r"groups must be a divisor of .* 4, or .* got .*\n.*1, 2, 4"
        ):
            tw.parallel.hybridize(model, groups=groups, layers=["0"])  # type: ignore[arg-type]  # to be refused
    narrow = torch.nn.ModuleDict({"narrow": torch.nn.Linear(5, 3)})
    with pytest.raises(
        tw.errors.SettingError, match=r"narrow has 5 features .* leaves some of the 4 workers"
    ):
        tw.parallel.hybridize(narrow, groups=1, layers=["narrow"])
    with pytest.raises(tw.errors.SettingError, match=r'example must be given with "auto"'):
        tw.parallel.hybridize(model, groups="auto", layers=["0"])
    os.environ["THINWIRE_SITE"] = "here" if dist.get_rank() < 3 else "there"
    with pytest.warns(UserWarning, match=r"group 1 of 2 \(workers 2 to 3\) spans the sites here, there"):
        tw.parallel.hybridize(CASES["mlp"].model(), groups=2, layers=["0"])
    del os.environ["THINWIRE_SITE"]
    refuse_unequal_batches()
    before = [id(p) for p in model.parameters()]
    plan = tw.parallel.hybridize(model, groups=2, layers=["0", "12"], dry_run=True)
    assert [id(p) for p in model.parameters()] == before
    assert plan.styles.keys() == {"0", "12"}
    assert not plan.meshes
    split = parallelized_by_torch(model, plan)
    assert torch.equal(split["0.weight"], CASES["mlp"].model().state_dict()["0.weight"])
    return together(FEW, FEW_STEPS)


def refuse_unequal_batches() -> None:
    """Gloo alone would end the process; in the first forward, and where all was well before."""
    rank, layers = dist.get_rank(), {"cnn": "classifier.0", "mlp": "0", "transformer": "embedding"}
    for name, layer in layers.items():
        case = CASES[name]
        model = case.model()
        tw.parallel.hybridize(model, groups=2, layers=case.layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(tw.errors.UsageError, match=r"wire='tls' cannot encrypt .* which is split"):
            tw.attach(model, optimizer, tw.AllReduce(), wire="tls")
        x, _ = case.batch(0)
        for good in range(3):
            if good:
                model(x[:3])
            if rank >= 2:
                continue
            told = r"inputs of different shapes: \(3,.* on worker 0, \(4,.* on worker 1\n.*drop_last"
            with pytest.raises(
                tw.errors.UsageError, match=rf"^{layer}: the workers of its group have {told}"
            ):
                model(x[: 3 + rank])


def parallelized_by_torch(model: torch.nn.Module, plan: tw.parallel.HybridPlan) -> State:
    """The plan's styles are a plan for `parallelize_module`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(3, 9, dtype=torch.float64)
    before = model(x)
    parallelize_module(model, mesh["tp"], dict(plan.styles))
    assert torch.allclose(model(x), before, rtol=1e-12)
    return tw.parallel.full_state_dict(model)


def check_exact(found: dict[Key, State], steps: int) -> None:
    for (name, optimizer, groups, sharded), state in found.items():
        for key, theirs in alone(name, optimizer, steps).items():
            distance = (state[key] - theirs).norm()
            assert distance <= 1e-9 * theirs.norm(), f"{name} {optimizer} {groups} groups {sharded}: {key}"


@pytest.mark.processes
def test_split_training_is_exact() -> None:
    for found in run_processes(4, few):
        assert list(found) == FEW
        check_exact(found, FEW_STEPS)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("workers", [2, 4, 6])
def test_every_split_is_exact(workers: int) -> None:
    for found in run_processes(workers, together, every(workers), STEPS, timeout_s=980):
        assert list(found) == every(workers)
        check_exact(found, STEPS)
