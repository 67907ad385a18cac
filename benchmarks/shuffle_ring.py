"""Does ShuffleRing make up for shards sorted by class, and what does it cost?

    python -m benchmarks.shuffle_ring --data DIR          # DIR has MNIST
    python -m benchmarks.shuffle_ring --parts cost        # two and a half minutes

Accuracy: a small network under gossip (dissemination with rotation, averaging before the update), eight
workers in one process, on MNIST in shards sorted by class. Which samples are in whose batch comes from the
real ring, run in threads. (Whole recipes on such shards, with any strategy: benchmarks.fidelity.)
Cost: two processes over Gloo, an emulated accelerator of 60 ms per step, batches of 128 CIFAR images, epochs
of 50 steps with the ring and without it in alternation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import thinwire as tw
from benchmarks.common import note, parser_of, print_head, print_row, result_file, run_workers
from thinwire.bench.harness import Train, time_steps
from thinwire.bench.plan import rotated
from thinwire.data import Shards, ShuffleRing, load_mnist
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.timings import Spread
from thinwire.wire.local import LocalWorld

WORKERS, BATCH, EPOCHS = 8, 32, 4
RATE, MOMENTUM, HIDDEN = 0.1, 0.9, 256
NET = "params=270000,layers=20,forward=0.02,backward=0.04"
Batches = NDArray[np.int64]
"""Sample numbers by step, worker and row."""

# -- who trains on what -------------------------------------------------------------------------------


def own(parts: NDArray[np.int64], seed: int) -> Batches:
    """Every worker keeps its shard and shuffles it by itself."""
    orders = np.random.default_rng(seed).permuted(np.stack([parts] * EPOCHS), axis=2)
    return np.concatenate([_steps(order) for order in orders])


def authors(parts: NDArray[np.int64], seed: int) -> Batches:
    """The code of GossipGraD's authors: a batch goes to the next worker after use, into the same places."""
    return np.concatenate([_steps(np.roll(parts, -epoch, axis=0)) for epoch in range(EPOCHS)])


def dealt(parts: NDArray[np.int64], seed: int) -> Batches:
    """Every worker has all samples, which are dealt out anew in each epoch."""
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(parts.reshape(-1)).reshape(parts.shape) for _ in range(EPOCHS)]
    return np.concatenate([_steps(order) for order in orders])


def ring(parts: NDArray[np.int64], seed: int) -> Batches:
    """The real ShuffleRing, in threads, with the numbers of samples as samples."""
    world = LocalWorld(len(parts))

    def work(rank: int) -> list[NDArray[np.int64]]:
        held, model = torch.from_numpy(parts[rank].copy()), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.Silent(), process_group=world.lane(rank)) as link:
            shuffle, used = ShuffleRing(held, link=link, seed=seed), []
            for epoch in range(EPOCHS):
                shuffle.set_epoch(epoch)
                used += [held[batch].numpy() for batch in shuffle.batches(BATCH) if len(batch) == BATCH]
        return used

    with ThreadPoolExecutor(len(parts)) as threads:
        return np.stack([np.stack(used) for used in threads.map(work, range(len(parts)))], axis=1)


def _steps(order: NDArray[np.int64]) -> Batches:
    """The order cut into whole batches, by step."""
    num_steps = order.shape[1] // BATCH
    return order[:, : num_steps * BATCH].reshape(len(order), num_steps, BATCH).swapaxes(0, 1)


# -- accuracy -----------------------------------------------------------------------------------------


def train(batches: Batches, data: dict[str, Tensor], seed: int, *, gossip: bool) -> float:
    """The test accuracy of the mean model, in percent; without gossip it is exact SGD."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HIDDEN, 784), (HIDDEN,), (10, HIDDEN), (10,)]
    weights = []
    for shape in shapes:
        scale = 0.0 if len(shape) == 1 else shape[1] ** -0.5
        one = torch.randn(shape, generator=generator) * scale
        weights.append(one.expand(WORKERS, *shape).clone().requires_grad_())
    momenta = [torch.zeros_like(weight) for weight in weights]
    peers = _peers(seed)
    for step, batch in enumerate(batches):
        x, y = data["x"][torch.from_numpy(batch)], data["y"][torch.from_numpy(batch)]
        loss = nn.functional.cross_entropy(_forward(weights, x).flatten(0, 1), y.flatten()) * WORKERS
        gradients = torch.autograd.grad(loss, weights)
        rate = RATE * (1 + math.cos(math.pi * step / len(batches))) / 2
        source = next(peers)
        with torch.no_grad():
            for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
                if gossip:
                    weight.copy_((weight + weight[source]) / 2)
                else:
                    gradient = gradient.mean(0, keepdim=True)
                weight.sub_(momentum.mul_(MOMENTUM).add_(gradient), alpha=rate)
    with torch.no_grad():
        mean = [weight.mean(0, keepdim=True) for weight in weights]
        right = _forward(mean, data["x_test"].unsqueeze(0))[0].argmax(1) == data["y_test"]
    return 100 * right.float().mean().item()


def _forward(weights: list[Tensor], x: Tensor) -> Tensor:
    hidden = torch.baddbmm(weights[1].unsqueeze(1), x, weights[0].mT).relu()
    return torch.baddbmm(weights[3].unsqueeze(1), hidden, weights[2].mT)


def _peers(seed: int) -> Iterator[NDArray[np.int64]]:
    """The peer that each worker receives from, by step."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(WORKERS)
        for hop in range(math.ceil(math.log2(WORKERS))):
            source = np.empty(WORKERS, dtype=np.int64)
            source[order] = np.roll(order, -(2**hop))
            yield source


def accuracies(folder: Path, seeds: range) -> dict[str, list[float]]:
    arrays = load_mnist(folder)
    parts = np.argsort(arrays.train.targets, kind="stable")[: 60_000 // WORKERS * WORKERS]
    data = {"y": torch.tensor(arrays.train.targets), "y_test": torch.tensor(arrays.test.targets)}
    for name, inputs in (("x", arrays.train.inputs), ("x_test", arrays.test.inputs)):
        data[name] = torch.tensor(inputs).flatten(1).float().div_(255)
    results = {}
    for name, batches, gossip in (
        ("exact SGD", own, False),
        ("gossip, every worker has all samples", dealt, True),
        ("gossip, own shards only", own, True),
        ("gossip, the ring of GossipGraD's authors", authors, True),
        ("gossip, ShuffleRing", ring, True),
    ):
        results[name] = [train(batches(parts.reshape(WORKERS, -1), s), data, s, gossip=gossip) for s in seeds]
        note(f"{name}: {results[name]}")
    return results


# -- cost ---------------------------------------------------------------------------------------------


def measure(num_turns: int) -> list[dict[str, list[float]]]:
    """Seconds and processor seconds per step, each without and with the ring, by turn; of one worker."""
    num_steps, batch_size = 50, 128
    images = torch.randint(0, 256, (num_steps * batch_size, 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),))
    model = EmulatedModel(parse_net(NET))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    turns = []
    with tw.attach(model, optimizer, tw.AllReduce()) as link:
        ways: list[Shards | ShuffleRing] = [Shards(num_samples=len(images))]
        ways.append(ShuffleRing(images, labels, link=link))

        def epoch(way: Shards | ShuffleRing) -> Train:
            def train(steps: int) -> None:
                for batch in way.batches(batch_size):
                    optimizer.zero_grad()
                    model(images[batch].float()).mean().backward()
                    optimizer.step()

            return train

        for turn in range(num_turns + 1):
            spent: dict[str, list[float]] = {"step_s": [0.0, 0.0], "processor_s": [0.0, 0.0]}
            for way in rotated((0, 1), turn):
                ways[way].set_epoch(turn)
                link.all_reduce([0.0])  # all start together
                timed = time_steps(epoch(ways[way]), num_steps)
                for name in spent:
                    spent[name][way] = timed[name]
            turns.append(spent)
    return turns[1:]  # the first one warms up


def print_cost(turns: list[dict[str, list[float]]]) -> None:
    print_head("", "without", "with the ring", "difference, median (quartiles)")
    for name, words in (("step_s", "a step"), ("processor_s", "processor time of it")):
        without, with_ring = zip(*(turn[name] for turn in turns), strict=True)
        more = Spread.of([1e3 * (b - a) for a, b in zip(without, with_ring, strict=True)])
        base, new = 1e3 * statistics.median(without), 1e3 * statistics.median(with_ring)
        spread = f"{more.median:+.2f} ms ({more.low:+.2f}, {more.high:+.2f}), {more.median / base:+.1%}"
        print_row(words, f"{base:.2f} ms", f"{new:.2f} ms", spread)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with MNIST, for accuracy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=["accuracy", "cost"], default=["accuracy", "cost"])
    arguments = parser.parse_args()
    if "accuracy" in arguments.parts and arguments.data is None:
        parser.error("accuracy needs --data")
    trial = arguments.seeds < 3 or arguments.turns < 20
    file, result = result_file("shuffle_ring", trial=trial), dict[str, Any]()
    if "accuracy" in arguments.parts:
        torch.set_num_threads(1)
        result["accuracy"] = accuracies(arguments.data, range(arguments.seeds))
        print_head("shards sorted by class", "test accuracy, mean", "by seed")
        for name, values in result["accuracy"].items():
            print_row(name, f"{statistics.mean(values):.2f} %", ", ".join(f"{v:.2f}" for v in values))
    if "cost" in arguments.parts:
        result["cost"] = run_workers(2, measure, arguments.turns)[0]
        print()
        print_cost(result["cost"])
    note(str(file.save(result)))


if __name__ == "__main__":
    main()
