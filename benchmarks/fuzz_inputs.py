"""Inputs for `fuzz`: valid ones, valid ones with a few edits, and junk, all from one random generator."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from thinwire.cli import app
from thinwire.hosts.description import FAULT_KINDS
from thinwire.recipes import registry as recipes
from thinwire.strategies import registry as strategies

JUNK = [
    *[
        "",
        " ",
        ",",
        ",,",
        "-",
        "--",
        "=",
        ":",
        "::",
        "a=b",
        "a:b=c",
        "..",
        "../x",
        "/",
        "/dev/null",
        "~",
        "*",
    ],
    *[
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1",
        "2",
        "0.5",
        "1e308",
        "1e400",
        "-0",
        "0x10",
        "1_000",
        "+3",
        "\u0663",
    ],
    *["9" * 30, "9" * 5000, "1e300h", "1..9999999999", "1*9999999", "x" * 300, "x" * 5000, "None", "true"],
    *[
        "\u00e9",
        "\udcff",
        "\n",
        "a\x1b[31m",
        "%s",
        "{}",
        "'",
        '"',
        "$HOME",
        "\\",
        "[1, 2]",
        "@file",
        "\u202e",
    ],
]
"""Texts; none is an absolute path that does not exist, since --out would create it."""
NUMBERS = ["1", "2", "3", "4", "64", "500", "1000", "20000", "1000000000", "99999999999999999999"]
RATES = ["100mbit", "1gbit", "1gbit*2,100mbit*2", "1gbit*100000", "2.5gbit/s", "8kbit", "1e3mbit"]
TIMES = ["0.4ms", "10s", "45min", "1h", "0s", "1e-9s"]
NETS = [
    *["resnet50", "resnet20,batch=4", "params=5e6,layers=16,forward=0.1,backward=0.2", "lstm-ptb,batch=1e30"],
    *["params=1e30,layers=3,forward=1,backward=1", "params=1e11,layers=1e11,forward=0,backward=0"],
]
OWN = [
    *[
        "thinwire.strategies.topk:TopK",
        "thinwire.recipes.catalog:digits_cnn",
        "math:sin",
        "sys:exit",
        "os:abort",
    ],
    *[
        "os:_exit",
        "builtins:input",
        "builtins:print",
        "os:walk",
        "platform:uname",
        "random:Random",
        "math:pi",
    ],
    *["thinwire:AllReduce", "thinwire.strategies.base:Strategy", "no_such:Thing", "json:", ":x", "a.b.c:d:e"],
]
ODD: list[Any] = [
    *[None, True, "", "x", b"", 0, -1, 1, 2, 10**400, 0.0, 0.5, -0.5, 1e308, float("nan"), float("inf")],
    *[1 + 2j, [], [1], (), {}, {1}, object(), int, len, range(3)],
]
"""Python values for settings."""


def edited(draw: random.Random, text: str) -> str:
    """`text` with one to three characters deleted, doubled, inserted, or exchanged."""
    letters = list(text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(letters) + 1)
        match draw.randrange(4):
            case 0:
                del letters[at : at + 1]
            case 1:
                letters[at:at] = letters[at : at + 1]
            case 2:
                letters.insert(at, draw.choice("0123456789.,:;=*+-_eE \u00e9"))
            case 3:
                letters[at : at + 1] = [draw.choice("0123456789.,:;=*+-_ax")]
    return "".join(letters).lstrip("/")  # never an absolute path


def varied(draw: random.Random, valid: list[str]) -> str:
    """A valid text, one with edits, or junk."""
    kind = draw.random()
    if kind < 0.15:
        return draw.choice(JUNK)
    text = draw.choice(valid)
    return edited(draw, text) if kind < 0.4 else text


def strategy_text(draw: random.Random) -> str:
    name = varied(draw, [*strategies.names(), *OWN])
    if draw.random() < 0.4:
        return name
    known = _setting_names()
    values = ["none", "true", "1", "0.1", "0", "-1", "auto", "bf16", "forward", "0." + "1" * 300]
    pairs = (f"{varied(draw, known)}={varied(draw, values)}" for _ in range(draw.randint(1, 3)))
    return ":".join([name, *pairs])


@functools.cache
def _setting_names() -> list[str]:
    return [s.name for name in strategies.names() for s in strategies.describe(name).settings]


def fault_text(draw: random.Random) -> str:
    fields = [f"{name}={varied(draw, NUMBERS)}" for name in ("host", "site", "step")]
    fields += [f"{name}={varied(draw, TIMES)}" for name in ("after", "seconds")]
    fields += [f"speed={varied(draw, ['0.5', '1', '0'])}", "host=1", "step=3", "after=2s"]
    chosen = draw.sample(fields, draw.randint(0, 3))
    return f"{varied(draw, list(FAULT_KINDS))}:{','.join(chosen)}"


Make = Callable[[random.Random], str]
_VALUES: dict[str, Make] = {
    "strategy": strategy_text,
    "names": strategy_text,
    "systems": lambda draw: ",".join(strategy_text(draw) for _ in range(draw.randint(0, 2))),
    "recipe": lambda draw: varied(draw, [*recipes.names(), *OWN]),
    "rivals": lambda draw: varied(draw, ["benchmarks.rivals", "tests.bench.some_rivals", "os", "no.such"]),
    "fault": fault_text,
    "slow": lambda draw: varied(draw, ["1=0.5", "0=1", "99=0.1"]),
    "rate": lambda draw: varied(draw, RATES),
    "uplink": lambda draw: varied(draw, RATES),
    "sites": lambda draw: varied(draw, ["2+2", "4+4", "1+3", "4"]),
    "emulate": lambda draw: varied(draw, NETS),
    "net": lambda draw: varied(draw, NETS),
    "workers": lambda draw: varied(draw, [*NUMBERS, "2..16", "4,8"]),
    "device": lambda draw: varied(draw, ["auto", "cpu", "cuda"]),
    "shuffle": lambda draw: varied(draw, ["dealt", "own", "ring"]),
    "scale": lambda draw: varied(draw, ["1", "0.1", "1e-9"]),
    "command": lambda draw: varied(draw, ["true", "no/such.py", "-m", "x" * 300 + ".py"]),
    "out": lambda draw: varied(draw, ["out", "a/b", "full"]),
    "file": lambda draw: varied(draw, ["a/b/key", "full", "full/key"]),
    "script": lambda draw: varied(draw, ["no/such.py", "full", "x" * 300 + ".py"]),
    "cluster": lambda draw: varied(draw, ["full", "none", "no/cluster.json"]),
    "against": lambda draw: varied(draw, ["full", "none"]),
    "paper": lambda draw: varied(draw, ["gtopk", "das", "diloco", "covenant"]),
    "apoptosis": lambda draw: varied(draw, ["conservative", "adaptive", "aggressive"]),
    "data": lambda draw: varied(draw, ["full", "none"]),
    "folder": lambda draw: varied(draw, ["full", "none"]),
    **dict.fromkeys(
        ("latency", "uplink_latency", "compute", "recovery", "time_limit"), lambda d: varied(d, TIMES)
    ),
}


def _number_text(draw: random.Random) -> str:
    return varied(draw, NUMBERS)


@functools.cache
def _commands() -> Any:
    return typer.main.get_command(app)


def command_line(draw: random.Random) -> list[str]:
    """The arguments of some command: some of its options, with values as its parameters have them."""
    command = _commands()
    words: list[str] = []
    while hasattr(command, "commands"):
        if draw.random() < 0.02:
            return [*words, draw.choice(JUNK)]
        name = draw.choice(sorted(command.commands))
        command = command.commands[name]
        words.append(name)
    options = [param for param in command.params if param.opts[0].startswith("-") and param.name != "help"]
    for param in draw.sample(options, min(len(options), draw.choice([0, 1, 1, 2, 2, 3, 5]))):
        words.append(draw.choice(param.opts))
        if not param.is_flag:
            make: Make = _VALUES.get(param.name, _number_text)
            words.append(make(draw))
    for param in command.params:
        if not param.opts[0].startswith("-") and (param.required or draw.random() < 0.5):
            words += [_VALUES[param.name](draw)]
    return words if draw.random() > 0.05 else [*words, draw.choice(JUNK)]


def damaged(draw: random.Random, content: bytes) -> bytes:
    """A file with some of its bytes cut off, changed, doubled or replaced; JSON also with other values."""
    if content[:1] == b"{" and draw.random() < 0.6:
        return _other_json(draw, content)
    at = draw.randrange(len(content) + 1)
    return draw.choice(
        [
            content[:at],
            content[at:],
            content[:at] + draw.randbytes(draw.randint(1, 20)) + content[at + draw.randint(0, 20) :],
            content + content,
            b"",
            b"\0" * len(content),
            b"[" * 100_000,
            b"null",
            b"{}",
        ]
    )


def _other_json(draw: random.Random, content: bytes) -> bytes:
    """One value of one line replaced, or its key removed."""
    odd: list[Any] = [
        None,
        True,
        "x",
        "",
        -1,
        0,
        10**30,
        1e300,
        -1e300,
        [],
        {},
        [[]],
        {"a": []},
        "\ud800",
        "../../x",
    ]
    whole = content.count(b"\n{") == 0  # one document, else one in every line
    lines: list[Any] = [content] if whole else content.splitlines()
    at = draw.randrange(len(lines))
    try:
        record = json.loads(lines[at])
    except ValueError:  # it was damaged before
        return content[: len(content) // 2]
    place = record
    while isinstance(place, dict) and place:
        key = draw.choice(sorted(place))
        if not (isinstance(place[key], dict) and place[key]) or draw.random() < 0.3:
            if draw.random() < 0.2:
                del place[key]
            else:
                place[key] = draw.choice(odd)
            break
        place = place[key]
    lines[at] = json.dumps(record).encode()
    return b"\n".join(lines) + b"\n"


def damage_one(draw: random.Random, folder: Path) -> str:
    """Damage, remove, exchange or replace one file below `folder`; what was done, in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    name = str(path.relative_to(folder))
    kind = draw.random()
    if kind < 0.85:
        path.write_bytes(damaged(draw, path.read_bytes()))
        return f"{name} damaged"
    path.unlink()
    if kind < 0.90:
        return f"{name} removed"
    if kind < 0.94:
        path.mkdir()
        return f"{name} is a folder"
    other = draw.choice(files)
    if other != path:
        path.write_bytes(other.read_bytes())
        return f"{name} is a copy of {other.relative_to(folder)}"
    return f"{name} removed"
