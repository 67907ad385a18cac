"""Strangers at the doors of a training: does it go on undisturbed, and is each of them told of once?

    python -m benchmarks.strangers
    python -m benchmarks.strangers --wire plain --frames 500 --steps 100 --trial

Three elastic workers of a keyed world train; an undisturbed run says what model they must end with. Each kind
of stranger has an address of its own on loopback: a wrong key, a recorded handshake, a port scanner at every
port that the workers have open (those of TLS while they connect too), random bytes, control messages without
a key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from benchmarks.common import parser_of, print_head, print_row, result_file
from thinwire.elastic.handshake import Stranger, answer_door
from thinwire.elastic.keys import read_key, write_key
from thinwire.elastic.membership import Member
from thinwire.wire.tls.files import beside, make

SIZE, STEP_S = 3, 0.02
WRONG_KEY, REPLAY, SCANNER, NOISE, MESSAGES = (f"127.0.0.{each}" for each in range(11, 16))
SOURCES = {
    WRONG_KEY: "wrong key",
    REPLAY: "recorded handshake",
    SCANNER: "port scanner",
    NOISE: "random bytes",
    MESSAGES: "control messages",
}
HANGS_S = 300.0
WAIT_S = 5.0
Address = tuple[str, int]


# -- a worker ---------------------------------------------------------------------------------------------


def train(rank: int, port: int, folder: str, steps: int, wire: str, tell: Connection) -> None:
    """Train, and tell of the door, of every step, and of the end."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place, THINWIRE_KEY_FILE=str(Path(folder) / "run.key"))
    logging.basicConfig(filename=Path(folder) / f"{rank}.log", level=logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.randn(SIZE * steps * 4, 8, dtype=torch.float64)
    chosen: Any = wire
    with tw.attach(model, optimizer, tw.AllReduce(), elastic=True, wire=chosen) as link:
        host, door = link.address.rsplit(":", 1)
        tell.send(("at", (host, int(door)), os.getpid()))
        sampler = link.sampler(len(data), batch_size=4)
        for _ in link.epochs(1):
            for step in link.each_step(sampler):
                began_s = time.perf_counter()
                with step as batch:
                    time.sleep(STEP_S)
                    model(data[batch]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                tell.send(("step", link.stats.steps, time.perf_counter() - began_s))
        generation = link.generation
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    tell.send(("end", digest, generation))


# -- strangers --------------------------------------------------------------------------------------------


@dataclass
class Strangers:
    """All of them at the doors of some workers, each at most `frames` times."""

    doors: list[Address]
    frames: int
    counts: Counter[str] = field(default_factory=Counter)
    """How often each has come."""
    let_in: list[str] = field(default_factory=list)
    stopped: bool = False
    ports: set[int] = field(default_factory=set)
    """That the scanner has found open."""

    def connect(self, source: str, to: Address) -> socket.socket:
        self.counts[SOURCES[source]] += 1
        return socket.create_connection(to, timeout=WAIT_S, source_address=(source, 0))

    def try_wrong_key(self, generator: random.Random) -> None:
        me = Member("w0@stranger/1", WRONG_KEY, 5)
        with suppress(OSError, Stranger):
            answer_door(
                self.connect(WRONG_KEY, generator.choice(self.doors)), me, generator.randbytes(32)
            ).socket.close()
            self.let_in.append("wrong key")

    def replay(self, generator: random.Random, recorded: bytes) -> None:
        with suppress(OSError), self.connect(REPLAY, generator.choice(self.doors)) as door:
            door.recv(4096)
            door.sendall(recorded)
            if door.recv(4096):
                self.let_in.append("recorded handshake")

    def scan(self, generator: random.Random) -> None:
        """As a scanner does: connect to what is open, wait for a banner for a moment, leave."""
        for port in sorted(open_ports(os.getpid())):
            self.ports.add(port)
            with suppress(OSError), self.connect(SCANNER, ("127.0.0.1", port)):
                pass
        time.sleep(0.01)

    def make_noise(self, generator: random.Random) -> None:
        with suppress(OSError), self.connect(NOISE, generator.choice(self.doors)) as door:
            end = b"\n" if generator.random() < 0.5 else b""
            door.sendall(generator.randbytes(generator.randrange(1, 3000)) + end)

    def send_message(self, generator: random.Random) -> None:
        """Lines that look like the ones of workers, with fields of any kind."""
        kinds = ["hello", "welcome", "thinwire", "roster", "set", "left", "join", "members", "relay", "beat"]
        text = json.dumps([generator.choice(kinds), *(random_value(generator) for _ in range(3))])
        with suppress(OSError), self.connect(MESSAGES, generator.choice(self.doors)) as door:
            door.sendall(
                f"{'0' * 32} {text}\n".encode() if generator.random() < 0.5 else f"{text}\n".encode()
            )

    def start(self, seed: int, recorded: bytes) -> list[threading.Thread]:
        """All kinds beside each other until all have come `frames` times, or `stopped`."""
        calls: list[tuple[str, Callable[[random.Random], None]]] = [
            (WRONG_KEY, self.try_wrong_key),
            (REPLAY, lambda generator: self.replay(generator, recorded)),
            (SCANNER, self.scan),
            (NOISE, self.make_noise),
            (MESSAGES, self.send_message),
        ]

        def repeat(source: str, call: Callable[[random.Random], None]) -> None:
            generator = random.Random(f"{seed} {source}")
            while not self.stopped and self.counts[SOURCES[source]] < self.frames:
                call(generator)

        threads = [threading.Thread(target=repeat, args=each, daemon=True) for each in calls]
        for thread in threads:
            thread.start()
        return threads


def random_value(generator: random.Random, depth: int = 2) -> Any:
    """Something that JSON can say."""
    kinds: list[Callable[[], Any]] = [
        lambda: generator.choice([None, True, False, "", "w0", "ready/w1", "\u0000", "9" * 300]),
        lambda: generator.choice([0, 1, -1, 1 << 70, 0.5, float("inf")]),
    ]
    if depth:
        size = generator.randrange(4)
        kinds.append(lambda: [random_value(generator, depth - 1) for _ in range(size)])
        kinds.append(lambda: {str(n): random_value(generator, depth - 1) for n in range(size)})
    return generator.choice(kinds)()


def record_handshake(door: Address, key: bytes) -> bytes:
    """What a guest with the key has said, as somebody on its way hears it."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def listen() -> None:
            client, _ = proxy.accept()
            with client, socket.create_connection(door) as real:
                client.sendall(real.recv(4096))
                said.append(client.recv(4096))
                real.sendall(said[0])
                client.sendall(real.recv(4096))

        thread = threading.Thread(target=listen)
        thread.start()
        guest = Member("guest", "127.0.0.1", 5)
        answer_door(socket.create_connection(proxy.getsockname()), guest, key).socket.close()
        thread.join()
    return said[0]


def open_ports(parent: int) -> set[int]:
    """Ports on which children of this process listen."""
    inodes = set()
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        grandchildren = Path(f"/proc/{child}/task/{child}/children").read_text().split()
        for each in (child, *grandchildren):
            with suppress(OSError):
                for link in Path(f"/proc/{each}/fd").iterdir():
                    with suppress(OSError):
                        inodes.add(os.readlink(link))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.add(int(words[1].rsplit(":", 1)[1], 16))
    return found


# -- a run ------------------------------------------------------------------------------------------------


def run(folder: Path, steps: int, wire: str, frames: int, seed: int) -> dict[str, Any]:
    """One training, with strangers if `frames`; how it has ended."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, workers = [], []
    for rank in range(SIZE):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, port, str(folder), steps, wire, theirs)
        workers.append(context.Process(target=train, args=arguments, daemon=True))
        workers[-1].start()
        theirs.close()
        pipes.append(ours)
    strangers, threads = Strangers([], frames), list[threading.Thread]()
    scanning = threading.Thread(target=_scan_while_starting, args=(strangers,), daemon=True)
    if frames:
        scanning.start()
    try:
        strangers.doors = [_receive(pipe, "at")[1] for pipe in pipes]
        if frames:
            recorded = record_handshake(strangers.doors[0], read_key(folder / "run.key"))
            threads = strangers.start(seed, recorded)
        seconds, ends = _follow(pipes)
    finally:
        strangers.stopped = True
        for thread in (*threads, *([scanning] if frames else [])):
            thread.join()
        for worker in workers:
            worker.kill()
            worker.join()
    logs = [line for rank in range(SIZE) for line in (folder / f"{rank}.log").read_text().splitlines()]
    told = Counter(name for line in logs for source, name in SOURCES.items() if f" {source}" in line)
    return {
        "ends": ends,
        "step_s": statistics.median(seconds),
        "counts": dict(strangers.counts),
        "let_in": strangers.let_in,
        "told": dict(told),
        "log": logs,
    }


def _scan_while_starting(strangers: Strangers) -> None:
    generator = random.Random(0)
    while not strangers.doors and not strangers.stopped:
        strangers.scan(generator)


def _receive(pipe: Connection, kind: str) -> Any:
    if not pipe.poll(HANGS_S):
        raise TimeoutError("a worker hangs")
    message = pipe.recv()
    assert message[0] == kind, message
    return message


def _follow(pipes: list[Connection]) -> tuple[list[float], list[Any]]:
    seconds, ends = [], []
    for pipe in pipes:
        while pipe.poll(HANGS_S):
            message = pipe.recv()
            if message[0] == "end":
                ends.append(message[1:])
                break
            seconds.append(message[2])
    return seconds, ends


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--wire", choices=("plain", "tls"), default="tls")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=10_000, help="of each kind at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="no result")
    options = parser.parse_args()
    saved, runs = result_file("strangers", trial=options.trial), {}
    for name, frames in (("undisturbed", 0), ("with strangers", options.frames)):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_key(folder / "run.key")
            make(beside(folder / "run.key"), days=1)
            runs[name] = run(folder, options.steps, options.wire, frames, options.seed)
    saved.save({"config": vars(options), "runs": runs})
    digests = {digest for each in runs.values() for digest, _ in each["ends"]}
    print_head("run", "ended", "generations", "step, ms")
    for name, each in runs.items():
        generations = sorted({generation for _, generation in each["ends"]})
        print_row(name, len(each["ends"]), generations, f"{1000 * each['step_s']:.1f}")
    print(f"\nmodels that they ended with: {len(digests)}\n")
    print_head("stranger", "came", "let in", "log lines of 3 workers")
    found = runs["with strangers"]
    for name in SOURCES.values():
        print_row(name, found["counts"].get(name, 0), found["let_in"].count(name), found["told"].get(name, 0))
    print(saved.path)


if __name__ == "__main__":
    main()
