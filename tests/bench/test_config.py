"""The configuration of a benchmark and its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import ResultFile
from thinwire.bench import config as configs
from thinwire.bench.config import QUICK, STANDARD, Study, provenance
from thinwire.errors import SettingError


@pytest.mark.parametrize("config", [STANDARD, QUICK], ids=["standard", "quick"])
def test_what_is_written_is_read_again(config: configs.BenchConfig, tmp_path: Path) -> None:
    chosen = replace(config, systems=("silent", "ddp"), rivals="some.module")
    configs.write(tmp_path, chosen, {"begin": provenance()})
    assert configs.read(tmp_path) == chosen


def test_the_grid_is_the_standard_one() -> None:
    assert STANDARD.workers == (2, 4, 8, 16)
    assert STANDARD.rates_bits_per_s == (50e6, 200e6, 1e9)
    assert len(STANDARD.nets) == 2
    assert [study.recipe for study in STANDARD.studies] == ["mnist-cnn", "cifar-resnet20"]
    assert [study.recipe for study in QUICK.studies] == ["digits-cnn"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"workers": (1,)}, "workers must be 2 to 64, got 1"),
        ({"rates_bits_per_s": (1.0,)}, "rate must be between"),
        ({"nets": ("resnet51",)}, "emulate must be one of"),
        ({"scale": 2.0}, "scale must be above 0 and at most 1"),
        ({"turns": 0}, "turns must be 1 to 1,000, got 0"),
        ({"minutes": 0}, "minutes must be above 0 and at most a year, got 0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, object], error: str) -> None:
    with pytest.raises(SettingError, match=error):
        replace(QUICK, **changes)  # type: ignore[arg-type]


def test_run_folders_have_plain_names(tmp_path: Path) -> None:
    study: Study = QUICK.studies[0]
    name = configs.run_folder(tmp_path, study, "all-reduce:overlap=forward").name
    assert name == "digits-cnn-all-reduce-overlap-forward"


def test_a_result_is_saved_with_its_provenance_and_replaced_when_it_grows(tmp_path: Path) -> None:
    file, other = ResultFile(tmp_path / "new", "x"), ResultFile(tmp_path / "new", "x")
    assert file.save({"rows": 1}) == file.save({"rows": 2}) == file.path
    content = json.loads((file.path or tmp_path).read_text())
    assert content["rows"] == 2
    assert content["begin"]["cores"] == content["end"]["cores"]
    assert other.save({}) != file.path
