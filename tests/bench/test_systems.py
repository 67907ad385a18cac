"""Systems by name: ours, rivals, and what is said when there are none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from benchmarks.topk_systems import bucket_bytes_at_scale
from thinwire.bench.systems import (
    USUAL_PERIOD,
    Ours,
    choose,
    family_of,
    find,
    load_rivals,
    ours,
    standard_names,
)
from thinwire.engine.bucket_plan import make_buckets
from thinwire.errors import SettingError
from thinwire.lab.nets import Net, parse_net
from thinwire.strategies import registry
from thinwire.strategies.all_reduce import AllReduce


def test_the_standard_grid_has_strategies_the_ceiling_first_and_some_settings() -> None:
    names = standard_names()
    assert names[0] == "silent"
    compared_with = {"partial-averaging", "post-local", "hierarchical-averaging", "downpour", "easgd"}
    assert {name.split(":")[0] for name in names} == set(registry.names()) - compared_with
    assert {"all-reduce", "all-reduce:overlap=forward"} <= set(names)
    assert {"gossip-grad", "gossip-grad:share=auto"} <= set(names)
    assert len(names) == len(set(names))


def test_rivals_are_found_from_the_current_folder() -> None:
    rivals = load_rivals(None)
    assert "ddp" in rivals
    assert choose(None, rivals) == [*standard_names(), *rivals]
    for name, rival in rivals.items():
        assert find(name, rivals) is rival
        assert family_of(rival) == "rival"
        assert rival.period >= 1


def test_elsewhere_there_are_none_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert load_rivals(None) == {}
    with pytest.raises(SettingError, match=r"rivals must be a module, got 'nowhere\.rivals'"):
        load_rivals("nowhere.rivals")
    (tmp_path / "empty_rivals.py").touch()
    with pytest.raises(SettingError, match=r"a module with all_rivals\(\), got 'empty_rivals'"):
        load_rivals("empty_rivals")
    (tmp_path / "broken_rivals.py").write_text("import not_there_at_all")
    with pytest.raises(SettingError, match=r"cannot be imported.*not_there_at_all"):
        load_rivals("broken_rivals")


def test_the_ceiling_and_ddp_are_always_measured_too() -> None:
    rivals = load_rivals(None)
    assert choose(["all-reduce:overlap=none"], rivals) == ["silent", "all-reduce:overlap=none", "ddp"]
    assert choose(["ddp", "silent"], rivals) == ["silent", "ddp"]
    assert choose(["all-reduce"], {}) == ["silent", "all-reduce"]


def test_unknown_systems_and_settings_are_refused() -> None:
    with pytest.raises(SettingError, match=r"systems must be among silent, .*ddp.*, got 'horovod'"):
        choose(["horovod"], load_rivals(None))
    with pytest.raises(SettingError, match="no rivals were found"):
        choose(["ddp"], {})
    with pytest.raises(SettingError, match="has no setting 'speed'"):
        choose(["all-reduce:speed=9"], {})


def test_ours_are_strategies_with_their_settings() -> None:
    system = ours("all-reduce:overlap=none")
    assert system.strategy.overlap == "none"
    assert (system.name, system.period, system.replicas_agree) == ("all-reduce:overlap=none", 1, True)
    assert family_of(system) == "ours"
    ceiling = find("silent", {})
    assert isinstance(ceiling, Ours)
    assert (family_of(ceiling), ceiling.period, ceiling.available()) == ("ceiling", 1, None)
    own = find("thinwire.strategies.all_reduce:AllReduce:overlap=none", {})
    assert isinstance(own, Ours)
    assert own.strategy == system.strategy


def test_a_strategy_is_timed_over_whole_periods() -> None:
    @dataclass(frozen=True, kw_only=True)
    class EveryFifty(AllReduce):
        period: int = 50

    assert Ours("every-fifty", EveryFifty()).period == 50
    assert ours("gossip-grad").period == USUAL_PERIOD


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "alexnet"])
def test_at_a_scale_there_are_as_many_buckets(name: str) -> None:
    def num_buckets(net: Net) -> int:
        shapes = [shape for layer in net.layers for shape in layer.shapes]
        named = [(str(i), Parameter(torch.empty(shape, device="meta"))) for i, shape in enumerate(shapes)]
        return len(make_buckets(named, bucket_bytes_at_scale(net, AllReduce(), world_size=4)))

    assert num_buckets(parse_net(name, scale=1 / 16)) == num_buckets(parse_net(name)) > 3
