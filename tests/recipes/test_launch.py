"""The environment of workers; starting and ending them is tried through the command line."""

from __future__ import annotations

import os
import subprocess
import sys

from thinwire.recipes.launch import environment, num_cores


def test_cores_are_shared_out_unless_the_user_has_decided() -> None:
    assert environment({}, 1)["OMP_NUM_THREADS"] == str(num_cores())
    assert environment({}, 1000)["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "3", "HOME": "/x"}, 2)["OMP_NUM_THREADS"] == "3"
    assert environment({"HOME": "/x"}, 2)["HOME"] == "/x"


def test_a_worker_ends_when_its_lifeline_does() -> None:
    code = "import time; from thinwire.recipes.worker import hold_on_to; hold_on_to(0); time.sleep(60)"
    read_end, write_end = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdin=read_end) as process:
        os.close(read_end)
        os.close(write_end)
        assert process.wait(timeout=30) == 130
