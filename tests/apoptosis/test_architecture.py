"""A shrunken model leaves as a plain module or as ONNX; a full-size one takes the sizes of a checkpoint."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.apoptosis.training import WIDTH, parts, step_once
from thinwire.errors import DataError


def shrunken() -> torch.nn.Sequential:
    model, optimizer = parts()
    settings = tw.Apoptosis(mode="aggressive", every=8, start=8, budget=0.1)
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link:
        for step in range(8):
            step_once(link, model, optimizer, step)
        plain = tw.apoptosis.export(model)  # while it is attached, hooks and all
    assert isinstance(plain, torch.nn.Sequential)
    return plain


def test_an_exported_model_is_plain_and_computes_the_same() -> None:
    plain, x = shrunken(), torch.randn(5, 8, dtype=torch.float64)
    first = plain[0]
    assert isinstance(first, torch.nn.Linear)
    assert first.out_features < WIDTH
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules())
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), plain(x))


def test_onnx_has_the_shrunken_size(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    plain, x = shrunken().float(), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries underneath
        tw.apoptosis.export_onnx(plain, (x,), tmp_path / "model.onnx")
    tqdm = pytest.importorskip("tqdm").tqdm
    if tqdm.monitor is not None:  # a thread that onnxscript leaves behind
        tqdm.monitor.exit()
        tqdm.monitor = None
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), plain(x).detach(), atol=1e-5)


def test_a_model_of_full_size_takes_a_smaller_state_dict() -> None:
    plain = shrunken()
    model, _ = parts(seed=1)
    assert tw.apoptosis.rebuild(model, plain.state_dict())
    assert model[0].out_features == plain[0].out_features
    x = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(model(x), plain(x))


def test_a_state_dict_that_is_larger_is_refused() -> None:
    small, (model, _) = shrunken(), parts()
    with pytest.raises(DataError, match="larger than the model's"):
        tw.apoptosis.rebuild(small, model.state_dict())


def test_a_folder_without_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    model, _ = parts()
    assert not tw.apoptosis.rebuild(model, tmp_path)
    assert model[0].out_features == WIDTH
