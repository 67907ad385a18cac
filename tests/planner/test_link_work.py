"""What links take from a processor is measured on the engine as it is."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

import thinwire as tw
from thinwire.hosts.description import describe
from thinwire.planner.cluster import stated
from thinwire.planner.link_work import LinkWork, LinkWorks, measure_links
from thinwire.planner.plan import links_of
from thinwire.planner.predict import CANDIDATES, Planner, settled
from thinwire.planner.workload import Workload
from thinwire.strategies import registry

SHAPES = ((256, 256), (256,), (256, 64), (64,))


def test_every_candidate_can_be_measured() -> None:
    strategies = [settled(registry.from_text(text)) for text in CANDIDATES]
    found = measure_links(SHAPES, strategies)
    assert set(found) == set(strategies)
    assert all(work.training_s >= 0 and work.beside_s >= 0 for work in found.values())


def test_more_numbers_and_more_to_do_take_longer() -> None:
    """Processor seconds, of which other programs take none; the differences are tenfold."""
    few, many = [(64, 64)] * 2, [(1024, 1024)] * 2
    exact = tw.AllReduce()
    small, large = (measure_links(shapes, [exact])[exact] for shapes in (few, many))
    assert small.training_s + small.beside_s < large.training_s + large.beside_s
    selects = tw.TopK(density=0.01)
    both = measure_links(many, [exact, selects])
    assert both[selects].beside_s > both[exact].beside_s


def test_a_part_of_a_large_model_stands_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, exact = [(512, 512)] * 8, tw.AllReduce()

    def measured_s() -> float:
        """The median of some tries: beside other programs a single one may be far off."""
        works = [measure_links(shapes, [exact])[exact] for _ in range(5)]
        return median(work.training_s + work.beside_s for work in works)

    whole_s = measured_s()
    monkeypatch.setattr("thinwire.planner.link_work.MOST_NUMBERS", 1 << 19)
    assert 0.1 < measured_s() / whole_s < 10


def test_what_cannot_be_trained_is_left_out() -> None:
    wrong = tw.GossipGraD(exchange="weights+momentum")  # there is no momentum
    assert measure_links(SHAPES, [wrong]) == {}


def test_only_where_the_model_computes_on_the_processor() -> None:
    assert links_of(Workload.of_sizes(1e6, 4, 0.1)) == {}


@pytest.mark.parametrize(
    ("cores", "expected_s"), [(None, 0.11), (4.0, 0.11), (1.5, 0.12), (1.0, 0.13), (0.5, 0.16)]
)
def test_it_takes_from_training_what_cores_do_not_give(cores: float | None, expected_s: float) -> None:
    """10 ms in the thread that trains, 20 ms beside it."""
    exact = tw.AllReduce()
    work = Workload(
        name="x", shapes=((10,),), forward_s=0.04, backward_s=0.06, optimizer_s=0.0, on_processor=True
    )
    hosts = stated(describe(hosts=1, rate="100gbit"), latency_s=0.0)
    hosts = replace(hosts, cores_per_worker=cores)
    links: LinkWorks = {exact: LinkWork(training_s=0.01, beside_s=0.02)}
    assert Planner(work, hosts, links).play(exact, 2).step_s == pytest.approx(expected_s, rel=1e-3)
    elsewhere = replace(work, on_processor=False)
    assert Planner(elsewhere, hosts, links).play(exact, 2).step_s == pytest.approx(0.1, rel=1e-3)
    assert Planner(work, hosts, links).play(exact, 1).step_s == pytest.approx(0.1, rel=1e-3)
