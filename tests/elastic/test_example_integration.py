"""The example of docs/elastic.md, run as its first lines say, with a worker killed on the way."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.elastic.keys import write_key

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


def start(key: Path, **place: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THINWIRE_KEY_FILE": str(key), **place}
    command = [sys.executable, "-u", "examples/elastic.py"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_the_example_survives_its_first_worker(tmp_path: Path) -> None:
    key = tmp_path / "run.key"
    write_key(key)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = [start(key, RANK=str(rank), **world) for rank in range(3)]
    try:
        assert workers[0].stdout is not None
        said = workers[0].stdout.readline()
        assert re.match(r"worker 0 of 3 listens on 127.0.0.1:\d+\n", said)
        while "epoch 2" not in workers[0].stdout.readline():
            time.sleep(0)
        workers[0].kill()
        outputs = [worker.communicate(timeout=500)[0] for worker in workers[1:]]
        assert [worker.returncode for worker in workers[1:]] == [0, 0]
        assert "epoch 19: 2 workers, generation 2" in outputs[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
