"""Models compiled by torch.compile, before or after attach; in processes, as threads compile by turns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, alone, loss_of, net, sgd
from tests.worlds import run_processes

STEPS = 5
QUICK = "aot_eager"
"""Traces forward and backward as the default backend does, and generates no code."""


def train(place: Place, model: nn.Module, called: nn.Module) -> Arrays:
    """Attach `model`, call `called`, which is the same model or its compiled self."""
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(called, place.part(step)).backward()
            optimizer.step()
    return {name.replace("_orig_mod.", ""): a for name, a in arrays(model).items()}


def plain(place: Place) -> Arrays:
    model = net()
    return train(place, model, model)


def train_compiled(cache: str) -> list[Arrays]:
    """Attached is the compiled model, the plain one whose compiled self is called, one compiled in place
    before or after, one with compiled blocks."""
    from torch._inductor import config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    config.compile_threads = 1
    # Compiling headers ahead and probing for vector instructions takes longer than these few kernels.
    config.cpp_cache_precompile_headers = False
    config.cpp.vec_isa_ok = False
    place, results = Place("process"), []
    if place.rank == 0:  # fill the cache, so that the code is generated once for both
        loss_of(torch.compile(net()), place.part(0)).backward()  # type: ignore[arg-type]
    dist.barrier()

    wrapped = torch.compile(net())
    assert isinstance(wrapped, nn.Module)
    results.append(train(place, wrapped, wrapped))

    model = net()
    called = torch.compile(model, backend=QUICK)
    assert isinstance(called, nn.Module)
    results.append(train(place, model, called))

    model = net()
    model.compile(backend=QUICK)
    results.append(train(place, model, model))

    for overlap in ("backward", "forward"):
        model = net()
        optimizer = sgd(model)
        with Place("process", overlap).attach(model, optimizer):  # hooks are there before the compiling call
            model.compile(backend=QUICK)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, place.part(step)).backward()
                optimizer.step()
        results.append(arrays(model))

    blocks = net()  # block by block, in both ways, as overlap="forward" needs it
    blocks[0] = torch.compile(blocks[0], backend=QUICK)  # type: ignore[operator, index]
    blocks[2].compile(backend=QUICK)  # type: ignore[index]
    return [*results, train(Place("process", "forward"), blocks, blocks)]


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++) on the CPU")
def test_compiled_models_equal_one_worker_with_the_whole_batch(tmp_path: Path) -> None:
    whole = alone(plain)
    first, second = run_processes(2, train_compiled, str(tmp_path), timeout_s=800)

    for ours, theirs in zip(first, second, strict=True):
        assert difference(ours, whole) < 1e-11
        assert same_bits(ours, theirs)


def test_a_compiled_model_keeps_its_state_dict() -> None:
    compiled = torch.compile(net(), backend="eager")
    assert isinstance(compiled, nn.Module)
    names = list(compiled.state_dict())
    with tw.attach(compiled, sgd(compiled), tw.AllReduce()):
        assert list(compiled.state_dict()) == names
