"""What the choice of groups expects of the lab's nets, beside the lab and the speed-ups of Das et al."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common import print_head, print_row
from benchmarks.hybrid_nets import NETS, RATE_BITS_PER_S
from thinwire.parallel import Network
from thinwire.parallel.choose import Choice, Costs, costs
from thinwire.parallel.volumes import LayerSize, divisors

LATENCY_S = 0.001
"""Of a message among workers that share two cores."""
RATES = (RATE_BITS_PER_S, 10 * RATE_BITS_PER_S)


def choice(name: str, workers: int, network: Network, minibatch: int | None = None) -> Choice:
    """The numbers of groups of a net's dense layers, at full size, as `hybridize` compares them."""
    minibatch = minibatch or NETS[name].minibatch
    net = NETS[name].at(workers, minibatch=minibatch)
    options: dict[str, dict[int, Costs]] = {}
    rest_bytes = 0
    for layer in net.layers:
        if not layer.name.startswith("fc"):
            rest_bytes += 4 * layer.num_params
            continue
        out, into = layer.shapes[0]
        size = LayerSize(
            in_features=into, out_features=out, num_weights=layer.num_params, rows=minibatch / workers
        )
        options[layer.name] = {
            groups: costs([size], size.better_split, workers, groups, network) for groups in divisors(workers)
        }
    rest_s = network.seconds(2 * (workers - 1) / workers * rest_bytes, 0)
    return Choice(options, rest_s, net.forward_s + net.backward_s)


def expected_s(cell: Mapping[str, Any], groups: Mapping[str, int]) -> float:
    """The step that is expected at full size, with these groups; in a lab of another speed, latency is
    another part of it."""
    network = Network(bits_per_s=RATE_BITS_PER_S, latency_s=LATENCY_S * cell["scale"].speed)
    return choice(cell["net"], cell["workers"], network).step_s(groups)


def alone_s(name: str, minibatch: int | None = None) -> float:
    """Seconds of one worker with the whole minibatch, at full size."""
    return (minibatch or NETS[name].minibatch) * NETS[name].seconds_per_sample


def predicted(name: str, workers: int, rate_bits_per_s: float, minibatch: int) -> float:
    """The speed-up over one worker that is expected, at full size."""
    chosen = choice(name, workers, Network(bits_per_s=rate_bits_per_s, latency_s=LATENCY_S), minibatch)
    return alone_s(name, minibatch) / chosen.step_s(chosen.best())


def show_scaling(measured: Mapping[tuple[str, int], float]) -> list[dict[str, Any]]:
    """Speed-ups over one node: published, measured in the lab by net and workers, and predicted."""
    print("\n### Beside the paper (other hardware and networks): speed-up over one node\n")
    columns = ("net", "nodes", "minibatch", "Das et al.", "lab, 1 Gbit/s")
    print_head(*columns, "predicted, 1 Gbit/s", "predicted, 10 Gbit/s")
    found = []
    for name in dict.fromkeys(net for net, _ in measured):
        paper = NETS[name].paper
        for nodes in sorted({*(nodes for net, nodes in measured if net == name), *paper, 64, 128}):
            published = paper.get(nodes)
            minibatch = published.minibatch if published else NETS[name].minibatch
            row: dict[str, Any] = {
                "net": name,
                "nodes": nodes,
                "minibatch": minibatch,
                "paper": published.speed_up if published else None,
                "lab": measured.get((name, nodes)),
                "predicted": [predicted(name, nodes, rate, minibatch) for rate in RATES],
            }
            found.append(row)
            speeds = ["-" if each is None else f"{each:.1f}x" for each in (row["paper"], row["lab"])]
            print_row(name, nodes, minibatch, *speeds, *(f"{each:.1f}x" for each in row["predicted"]))
    return found
