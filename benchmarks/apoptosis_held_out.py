"""Apoptosis on networks that nothing was tuned for: what do they lose, and what is left alone?

    python -m benchmarks.apoptosis_held_out --data DIR            six networks, two seeds: minutes
    python -m benchmarks.apoptosis_held_out --data DIR --networks resnet,lstm --trial

Each is trained with and without apoptosis on the same batches, with all settings at their defaults but for
`every`, a sixty-fourth of the steps. No network was added, dropped or changed after its result was seen; the
rule for recurrent layers was made after that of the LSTM.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.apoptosis_problems import accuracy
from benchmarks.apoptosis_training import NUM_CHECKS, batches, count, predict
from benchmarks.common import note, parser_of, print_head, print_row, result_file
from thinwire.data import load_cifar, load_mnist
from thinwire.recipes import samples
from thinwire.recipes.samples import TensorSamples


class NormedBlock(nn.Module):
    """x + W2 gelu(W1 norm(x))"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.rise, self.fall = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.fall(nn.functional.gelu(self.rise(self.norm(x))))
        return x + change


def normed_mlp() -> nn.Module:
    blocks = [NormedBlock(128, 512) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), *blocks, nn.LayerNorm(128), nn.Linear(128, 10))


class ResidualBlock(nn.Module):
    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(given, made, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(made), nn.BatchNorm2d(made)
        self.skip = nn.Conv2d(given, made, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(self.norm_one(self.one(x)).relu()))
        total: Tensor = y + self.skip(x)
        return total.relu()


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Lstm(nn.Module):
    """Reads the rows of an image one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(x.flatten(1).unflatten(1, (28, 28)))[0][:, -1])
        return scores


def conv1d() -> nn.Module:
    """Rows of an image are the channels."""
    layers: list[nn.Module] = [nn.Flatten(1), nn.Unflatten(1, (28, 28))]
    for given, made in ((28, 64), (64, 128)):
        layers += [nn.Conv1d(given, made, 3, padding=1), nn.BatchNorm1d(made), nn.SiLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(7 * 128, 64), nn.SiLU(), nn.Linear(64, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind())
        change: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + change


class Transformer(nn.Module):
    """Rows of an image are the tokens; blocks are written out, or those of torch."""

    def __init__(self, *, torch_layers: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(28, 64), nn.Parameter(0.02 * torch.randn(28, 64))
        blocks = [[Attention(64, 4), NormedBlock(64, 256)] for _ in range(2)]
        if torch_layers:
            blocks = [
                [nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)]
                for _ in range(2)
            ]
        self.blocks = nn.Sequential(*(block for pair in blocks for block in pair))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(1).unflatten(1, (28, 28))) + self.place
        scores: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return scores


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gelu-mlp-layernorm": ("mnist", normed_mlp),
    "resnet": ("cifar", resnet),
    "lstm": ("mnist", Lstm),
    "conv1d": ("mnist", conv1d),
    "transformer": ("mnist", lambda: Transformer(torch_layers=False)),
    "torch-transformer": ("mnist", lambda: Transformer(torch_layers=True)),
}
BATCH, LEARNING_RATE = 64, 2e-3


@dataclass
class Outcome:
    """One training."""

    network: str
    apoptosis: bool
    seed: int
    accuracy: float
    parameters: tuple[int, int]
    widths: dict[str, int]
    left_alone: dict[str, str]
    seconds: float


def train(
    network: str, data: tuple[TensorSamples, TensorSamples], epochs: int, seed: int, shrinks: bool
) -> Outcome:
    train_data, test_data = data
    torch.manual_seed(seed)
    model = NETWORKS[network][1]()
    full, steps = count(model), epochs * (len(train_data) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    apoptosis = tw.Apoptosis(every=max(1, steps // NUM_CHECKS)) if shrinks else None
    began_s = time.process_time()
    with tw.attach(model, optimizer, tw.AllReduce(), num_steps=steps, apoptosis=apoptosis) as link:
        for epoch in range(epochs):
            for chosen in batches(len(train_data), BATCH, 1000 * seed + epoch):
                inputs, targets = train_data.take(chosen)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                link.observe(loss)
                optimizer.step()
                schedule.step()
        history = link.companion.history if shrinks else []  # type: ignore[union-attr]
        last = history[-1] if history else None
    seconds = time.process_time() - began_s
    return Outcome(
        network, shrinks, seed, accuracy(*predict(model, test_data)), (full, count(model)),
        dict(last.widths) if last else {}, dict(last.left_alone) if last else {}, seconds,
    )  # fmt: skip


def load(folder: Path, size: int) -> dict[str, tuple[TensorSamples, TensorSamples]]:
    """A random part of each training set, the same for all networks and seeds, and the whole test sets."""
    found = {}
    mnist = folder / "MNIST" if (folder / "MNIST").exists() else folder
    for name, data in (
        ("mnist", samples.grey_images(load_mnist(mnist), highest=255)),
        ("cifar", samples.colour_images(load_cifar(folder))),
    ):
        assert isinstance(data.train, TensorSamples)
        assert isinstance(data.test, TensorSamples)
        chosen = torch.from_numpy(np.random.default_rng(0).permutation(len(data.train))[:size].copy())
        train = replace(data.train, inputs=data.train.inputs[chosen], targets=data.train.targets[chosen])
        found[name] = (train, data.test)
    return found


def table(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    rows = []
    for network in dict.fromkeys(each.network for each in outcomes):
        plain, shrunk = (
            [each for each in outcomes if each.network == network and each.apoptosis is shrinks]
            for shrinks in (False, True)
        )
        if not plain or not shrunk:
            continue
        rows.append(
            {
                "network": network,
                "without": float(np.mean([each.accuracy for each in plain])),
                "with": float(np.mean([each.accuracy for each in shrunk])),
                "fewer_parameters": float(
                    np.mean([each.parameters[0] / each.parameters[1] for each in shrunk])
                ),
                "seeds": [each.seed for each in shrunk],
                "widths": shrunk[-1].widths,
                "left_alone": shrunk[-1].left_alone,
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST and cifar10.npz")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=12800, help="training samples of each data set")
    parser.add_argument("--trial", action="store_true", help="only shows that it works")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file, data = result_file("apoptosis_held_out", trial=options.trial), load(options.data, options.samples)
    outcomes: list[Outcome] = []
    for seed in range(options.seeds):
        for network in options.networks.split(","):
            for shrinks in (False, True):
                outcomes.append(train(network, data[NETWORKS[network][0]], options.epochs, seed, shrinks))
                note(f"{network}, seed {seed}: {vars(outcomes[-1])}")
                file.save(
                    {"config": {**vars(options), "data": "DIR"}, "table": table(outcomes)},
                    runs=[vars(each) for each in outcomes],
                )
    print_head("network", "without", "with", "parameters", "left alone")
    for row in table(outcomes):
        alone = "; ".join(f"{layer}: {reason}" for layer, reason in row["left_alone"].items())
        fewer = f"{row['fewer_parameters']:.2f}x fewer"
        print_row(row["network"], f"{row['without']:.4f}", f"{row['with']:.4f}", fewer, alone)
    note(f"saved {file.path}")


if __name__ == "__main__":
    main()
