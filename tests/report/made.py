"""Folders of made-up runs and benchmarks, written as workers write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.event_log import EventWriter
from thinwire.events import Evaluated, Failed, Progress, Record, RunEnded, RunStarted, StepTimed, Summary

BEGAN = 1_800_000_000.0
NUM_STEPS = 100
NETS = {"params=1.25e6,layers=16,forward=0.1,backward=0.2": 1.25e6, "resnet-made-up": 5e6}
SYSTEMS: list[tuple[str, Literal["ceiling", "ours", "rival"], float, float]] = [
    # name, family, bytes per parameter over a ring, part of the time on the wire that is hidden
    ("silent", "ceiling", 0.0, 0.0),
    ("all-reduce", "ours", 4.0, 0.15),
    ("all-reduce:overlap=forward", "ours", 4.0, 0.25),
    ("ddp", "rival", 4.0, 0.12),
    ("ddp-fp16", "rival", 2.0, 0.12),
    ("powersgd-r1", "rival", 0.1, 0.0),
    ("post-local-sgd", "rival", 1.0, 0.0),
    ("torchft-diloco", "rival", 0.3, 0.1),
]


@dataclass
class Clock:
    """Stands until it is set."""

    now: float

    def read(self) -> float:
        return self.now


TOLD = {"topk": {"sparse_s": 0.03, "dense_s": 0.06}, "gtopk": {"sparse_s": 0.06, "dense_s": 0.03}}
"""By top-k strategies: that it pays, and that it does not."""


def make_run(
    folder: Path,
    *,
    strategy: str = "all-reduce",
    settings: Mapping[str, object] | None = None,
    speeds: Sequence[float] = (1.0, 1.0),
    exposed_share: float = 0.3,
    steps: int = NUM_STEPS,
    end: Literal["well", "badly", "not"] = "well",
    more: Mapping[str, object] | None = None,
) -> Path:
    """A run on as many workers as there are speeds; the others wait for the slowest."""
    config: dict[str, object] = {"recipe": "digits-cnn", "strategy": strategy, "settings": settings or {}}
    config |= {"workers": len(speeds), "epochs": 5, "batch_size": 16, "seed": 0, **(more or {})}
    folder.mkdir(parents=True)
    facts = {"config": config, "versions": {"torch": "2.13"}, "platform": "Linux", "cores": 2}
    (folder / "config.json").write_text(json.dumps(facts))
    step_s = 0.01 / min(speeds) / (1 - exposed_share)
    distance = (0.4 if strategy == "silent" else 0.0) if config.get("clock") == "virtual" else None
    for rank, speed in enumerate(speeds):
        clock = Clock(BEGAN + rank / 10)
        with EventWriter(folder, rank, clock=clock.read) as writer:
            writer.write(
                RunStarted(
                    config=config,
                    versions={"torch": "2.13"},
                    host=f"h{rank}",
                    pid=rank,
                    world_size=len(speeds),
                )
            )
            for record in _training(rank, steps, step_s, 0.01 / speed, distance):
                clock.now = BEGAN + 1 + record.train_s + rank / 1000
                writer.write(record)
            for last in _last_words(rank, config, steps, step_s, 0.01 / speed, end):
                writer.write(last)
    return folder


def _training(
    rank: int, steps: int, step_s: float, compute_s: float, distance: float | None
) -> list[Progress | Evaluated]:
    records: list[Progress | Evaluated] = []
    for step in range(5, steps + 1, 5):
        records.append(
            Progress(
                step=step,
                num_steps=NUM_STEPS,
                epoch=1 + (step - 1) // 20,
                num_epochs=5,
                loss=2.3 * math.exp(-step / 20) + 0.01 * (1 + rank),
                samples_per_s=16 / step_s,
                sent_bytes=150_000 * step,
                exposed_s=(step_s - compute_s) * step,
                train_s=step_s * step,
            )
        )
        if rank == 0 and step % 20 == 0:
            value = 1 - math.exp(-step / 22)
            records.append(
                Evaluated(
                    step=step,
                    epoch=step // 20,
                    metric="accuracy",
                    value=value,
                    loss=0.1,
                    train_s=step_s * step,
                    distance=distance,
                )
            )
    return records


def _last_words(
    rank: int, config: Mapping[str, object], steps: int, step_s: float, compute_s: float, end: str
) -> list[Record]:
    if end == "badly":
        message = "worker 1 on h1: the loss is <nan> & more"
        cause = Failed(host="h1", error="NumericError", message=message, hint="lower the learning rate")
        lost = Failed(host=f"h{rank}", error="PeerLost", message="worker 1 on h1 is lost", consequence=True)
        return [cause if rank == 1 else lost]
    if end == "not":
        return []
    exposed_s = (step_s - compute_s) * steps
    ended = RunEnded(
        steps=steps,
        rounds=steps,
        samples=16 * steps,
        sent_bytes=150_000 * steps,
        received_bytes=150_000 * steps,
        messages=2 * steps,
        exposed_s=exposed_s,
        train_s=step_s * steps,
    )
    value = 1 - math.exp(-steps / 22)
    sparse = str(config["strategy"]) == "gtopk"
    summary = Summary(
        recipe="digits-cnn",
        strategy=str(config["strategy"]),
        settings={},
        workers=int(str(config["workers"])),
        epochs=5,
        steps=steps,
        metric="accuracy",
        value=value,
        target=0.9,
        reached=value >= 0.9,
        loss=0.1,
        train_s=step_s * steps,
        samples_per_s=16 / step_s,
        sent_bytes=150_000 * steps,
        sent_bytes_per_step=150_000,
        messages=2 * steps,
        exposed_share=exposed_s / (step_s * steps),
        instruments=TOLD.get(str(config["strategy"]), {"late_rounds": 2.5, "share": 0.25}),
        advice="GTopK has <few> steps" if sparse else "",
    )
    return [ended, summary] if rank == 0 else [ended]


def make_bench(
    folder: Path,
    *,
    workers: Sequence[int] = (2, 4, 8, 16),
    rates: Sequence[float | None] = (50e6, 200e6, 1e9),
    nets: Sequence[str] = tuple(NETS),
    turns: int = 5,
    trainings: bool = True,
) -> Path:
    """A benchmark whose times follow from arithmetic, with a little scatter; one rival is not installed."""
    folder.mkdir(parents=True)
    study = {"recipe": "digits-cnn", "workers": 2, "rate_bits_per_s": 50e6}
    begin = {"torch": "2.13", "cores": 2, "commit": "0123456789abcdef", "load_average": [0.5, 0.4, 0.3]}
    facts = {"config": {"turns": turns, "studies": [study]}, "begin": begin, "end": {"load_average": [1.5]}}
    (folder / "bench.json").write_text(json.dumps(facts))
    with EventWriter(folder, 0, clock=lambda: BEGAN) as writer:
        for net in nets:
            for rate in rates:
                for count in workers:
                    for turn in range(turns):
                        for system in range(len(SYSTEMS)):
                            writer.write(_block(net, rate, count, turn, system))
                    writer.write(_absent(net, rate, count))
    if trainings:
        for name, family, _, _ in SYSTEMS[1:4]:
            strategy, _, setting = name.partition(":")
            settings = {"overlap": setting.partition("=")[2] or "backward"} if family == "ours" else {}
            share = {"all-reduce": 0.5, "ddp": 0.6}.get(name, 0.4)
            run = folder / "runs" / f"digits-{name.replace(':', '-')}"
            make_run(run, strategy=strategy, settings=settings, exposed_share=share)
    return folder


def _block(net: str, rate: float | None, workers: int, turn: int, system: int) -> StepTimed:
    name, family, size, hidden = SYSTEMS[system]
    sent = 2 * size * NETS.get(net, 1e6) * (workers - 1) / workers
    wire_s = 8 * sent / (rate or 10e9) + (0.002 * workers if size else 0.0)
    exposed_s = max(wire_s - hidden, 0.02 * (size > 0))
    scatter = 1 + 0.02 * math.sin(turn * 2.1 + system)
    return StepTimed(
        system=name,
        family=family,
        workers=workers,
        rate_bits_per_s=rate,
        net=net,
        turn=turn,
        step_s=(0.32 + exposed_s + 0.01 * system) * scatter,
        compute_s=0.3,
        exposed_s=None if family == "rival" else exposed_s,
        processor_s=0.05 * system,
        sent_bytes=sent,
        messages=None if family == "rival" else 2.0 * workers,
        emulated=True,
        unavailable=None,
        processor_full=workers == 16 and rate == 1e9,
    )


def _absent(net: str, rate: float | None, workers: int) -> StepTimed:
    return StepTimed(
        system="torchft-local-sgd",
        family="rival",
        workers=workers,
        rate_bits_per_s=rate,
        net=net,
        turn=0,
        step_s=None,
        compute_s=0.3,
        exposed_s=None,
        processor_s=None,
        sent_bytes=None,
        messages=None,
        emulated=True,
        unavailable="not installed: pip install 'thinwire[rivals]'",
    )
