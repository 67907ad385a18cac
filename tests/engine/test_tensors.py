"""Trees as files: all kinds come back, others are refused, and safetensors is what is written."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.engine import tensors
from thinwire.errors import UsageError


def test_trees_of_all_kinds_come_back(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "nothing": {},
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.0),
        "half": torch.randn(3, 2).bfloat16().t(),
        "complex": torch.randn(3, dtype=torch.complex128).conj(),
        "flags": torch.tensor([True, False]),
        "tree": (1, [torch.arange(3), None], {0: "a", "0": torch.ones(1), (1, None): float("inf")}),
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "array": np.arange(4, dtype=np.uint32)[::2],
        "scalar": np.float32(0.1),
        "__metadata__": torch.ones(1),
    }
    facts = tensors.write(tmp_path / "part", tensors.snapshot(tree))
    again = tensors.read(tmp_path / "part", facts)
    assert list(again) == list(tree)
    for name in ("empty", "number", "half", "complex", "flags", "a.b", "__metadata__"):
        assert torch.equal(again[name], tree[name])
        assert again[name].dtype == tree[name].dtype
    assert again["nothing"] == {}
    assert again["a"]["b"].item() == 2
    first, (counted, nothing), inner = again["tree"]
    assert (first, counted.tolist(), nothing) == (1, [0, 1, 2], None)
    assert (inner[0], inner["0"].item(), inner[1, None]) == ("a", 1, float("inf"))
    assert again["array"].dtype == np.uint32
    assert again["array"].tolist() == [0, 2]
    assert again["scalar"] == np.float32(0.1)


def test_a_snapshot_does_not_change_with_the_model(tmp_path: Path) -> None:
    weight = torch.ones(3)
    taken = tensors.snapshot({"weight": weight})
    weight.zero_()
    facts = tensors.write(tmp_path / "part", taken)
    assert tensors.read(tmp_path / "part", facts)["weight"].tolist() == [1, 1, 1]


def test_any_reader_of_safetensors_finds_the_tensors(tmp_path: Path) -> None:
    """Read as its specification says, with nothing of ours."""
    weight = torch.randn(2, 3)
    tensors.write(tmp_path / "part", tensors.snapshot({"step": 3, "model": {"weight": weight}}))
    content = (tmp_path / "part").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert all(isinstance(each, str) for each in header["__metadata__"].values())
    entry = header["model.weight"]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    assert (entry["dtype"], end) == ("F32", len(content))
    found = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
    assert np.array_equal(found, weight.numpy())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (date(2020, 1, 1), "date"),
        (np.array(["a"], dtype=object), "ndarray"),
        (torch.ones(2, 2).to_sparse(), "Tensor"),
        (torch.ones(1, device="meta"), "Tensor"),
        (print, "builtin_function_or_method"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"loader\.at\.0 is a {kind}, which a checkpoint cannot hold"):
        tensors.snapshot({"loader": {"at": [value]}})
