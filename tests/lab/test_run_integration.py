"""Real labs: separate hosts, faults, exit codes, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from tests.lab.labs import needs_lab
from thinwire.errors import SettingError, UsageError
from thinwire.hosts.description import describe
from thinwire.lab.run import Job, LabResult, run

pytestmark = [pytest.mark.lab, needs_lab]

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def ours_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the thinwire under test, installed or not."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE), prepend=os.pathsep)


def _run(*command: str, hosts: int = 2, rate: str = "100mbit", faults: list[str] | None = None) -> LabResult:
    description = describe(hosts=hosts, rate=rate, faults=faults or [])
    return run(Job(description=description, command=command, time_limit_s=60))


def _interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_hosts_have_their_own_network_and_no_way_out(capfd: pytest.CaptureFixture[str]) -> None:
    before = _interfaces()
    script = (
        "hostname; ip -4 -o addr show dev eth0; ip route; getent hosts host1; exec 3<>/dev/tcp/192.0.2.1/80"
    )
    outcome = _run("bash", "-c", f"{script} || true", hosts=3)
    assert outcome.exit_code == 0
    out, err = capfd.readouterr()
    for index in range(3):
        lines = [
            line.removeprefix(f"[host{index}] ") for line in out.splitlines() if f"[host{index}]" in line
        ]
        assert lines[0] == f"host{index}"
        assert f"10.77.0.{index + 1}/16" in lines[1]
        assert lines[2].startswith("10.77.0.0/16 dev eth0")
        assert lines[3].split() == ["10.77.0.2", "host1"]
        assert len(lines) == 4
    assert err.count("Network is unreachable") >= 3
    assert _interfaces() == before


def test_more_hosts_all_talk_to_each_other_than_the_kernel_learns_addresses_of(tmp_path: Path) -> None:
    """40 hosts have 1,560 neighbours; the table of learned ones holds 1,024 for the whole machine."""
    script = tmp_path / "connect_all.py"
    script.write_text(
        textwrap.dedent("""
        import os, socket, time

        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        server = socket.create_server(("0.0.0.0", 5000), backlog=count)
        peers = [f"10.77.0.{other + 1}" for other in range(count) if other != rank]
        kept = []
        for peer in peers:
            while True:  # until it listens
                try:
                    kept.append(socket.create_connection((peer, 5000), timeout=10))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
        kept += [server.accept() for _ in peers]
        """)
    )
    assert _run("python3", str(script), hosts=40).exit_code == 0


def test_only_workers_are_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    assert _run(str(script)).exit_code == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[host0] hello", "[host1] hello"]
    assert err == ""


def test_workers_know_their_site_if_there_are_several(capfd: pytest.CaptureFixture[str]) -> None:
    command = ("sh", "-c", "echo site ${THINWIRE_SITE-none}")
    several = describe(hosts=3, rate="1gbit", sites="1+2", uplink="10mbit")
    assert run(Job(description=several, command=command, time_limit_s=60)).exit_code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[host0] site 0",
        "[host1] site 1",
        "[host2] site 1",
    ]
    assert _run(*command, hosts=1).exit_code == 0
    assert capfd.readouterr().out == "[host0] site none\n"


def test_scripts_are_forked_from_a_process_with_torch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "forked.py"
    script.write_text(
        "import os, sys, numpy\nprint('torch' in sys.modules, sys.argv[1:], numpy.random.rand())"
    )
    for command in ((str(script), "-x"), (sys.executable, str(script), "-x")):
        assert _run(*command).exit_code == 0
        lines = capfd.readouterr().out.splitlines()
        assert all("] True ['-x']" in line for line in lines)
        assert len({line.split()[-1] for line in lines}) == 2  # numpy has another seed in each worker


def test_the_first_failure_is_the_exit_code_and_ends_the_others() -> None:
    description = describe(hosts=3, rate="1gbit")
    command = ("sh", "-c", '[ "$RANK" = 1 ] && exit 7; sleep 300')
    outcome = run(Job(description=description, command=command, grace_s=0.2, time_limit_s=60))
    assert outcome.exit_code == 7
    assert [worker.exit_code for worker in outcome.workers] == [143, 7, 143]


def test_the_others_go_on_if_asked() -> None:
    description = describe(hosts=2, rate="1gbit")
    command = ("sh", "-c", '[ "$RANK" = 1 ] && exit 7; sleep 1')
    outcome = run(Job(description=description, command=command, grace_s=0, keep_going=True, time_limit_s=60))
    assert [worker.exit_code for worker in outcome.workers] == [0, 7]
    assert outcome.exit_code == 7


def test_the_time_limit_ends_even_those_who_do_not_listen() -> None:
    description = describe(hosts=2, rate="1gbit")
    command = ("sh", "-c", "trap '' TERM; sleep 300 & wait; sleep 300")
    outcome = run(Job(description=description, command=command, time_limit_s=3))
    assert outcome.exit_code == 124
    assert {worker.exit_code for worker in outcome.workers} == {137}


def test_a_program_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert _run("no-such-program").exit_code == 127
    assert "cannot run no-such-program: No such file or directory" in capfd.readouterr().err


def test_bad_input_is_refused_before_anything_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.run.enter_command", lambda: pytest.fail("something was created"))
    with pytest.raises(SettingError, match="rate must be"):
        _run("true", rate="0mbit")
    with pytest.raises(SettingError, match="fault host must be 0 to 1"):
        _run("true", faults=["kill:host=2,step=1"])
    with pytest.raises(SettingError, match=r"a script that exists, got 'nowhere.py'"):
        _run("nowhere.py")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, path=None: None if name == "tc" else which(name, path=path)
    )
    with pytest.raises(
        UsageError, match=r"needs `tc`, which is not installed\nhint: apt-get install iproute2"
    ):
        _run("true")


def test_where_namespaces_are_not_allowed_every_try_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.run._refusal", lambda _: "Operation not permitted")
    with pytest.raises(UsageError) as raised:
        _run("true")
    assert "--user --map-root-user" in str(raised.value)
    assert "Operation not permitted" in str(raised.value)
    assert "hint: " in str(raised.value)


def _start_and_kill(runner: list[str], mark: str) -> None:
    """Start a lab that holds sleepers with a telling name, SIGKILL whoever started it, see all of it go."""
    process = subprocess.Popen(runner)
    try:
        _wait_until(lambda: len(_processes(mark)) >= 3, "the lab to start")
        namespaces = {_network(pid) for pid in _processes(mark)} - {None}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(namespaces) == 3
    assert _network(os.getpid()) not in namespaces
    _wait_until(lambda: not _processes(mark), "the processes to go")
    _wait_until(lambda: not any(_network(pid) in namespaces for pid in _pids()), "the namespaces to go")


def _wait_until(true: object, what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.01)


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _processes(mark: str) -> list[int]:
    """Return the processes called `sleep MARK`."""
    found = []
    for pid in _pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"sleep" and mark.encode() in words:
            found.append(pid)
    return found


def _network(pid: int) -> str | None:
    """Return the network namespace of a process; None if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _runner(python: str, mark: str) -> list[str]:
    code = f"""
        from thinwire.hosts.description import describe
        from thinwire.lab.run import Job, run
        description = describe(hosts=3, rate="1gbit", sites="1+2", uplink="1mbit")
        run(Job(description=description, command=("sleep", "{mark}")))
    """
    return [python, "-c", textwrap.dedent(code)]


@pytest.mark.timeout(300)
def test_killed_in_the_middle_nothing_remains() -> None:
    interfaces = _interfaces()
    for _ in range(10):
        mark = f"6{uuid.uuid4().int % 10**9:09}"
        _start_and_kill(_runner(sys.executable, mark), mark)
    assert _interfaces() == interfaces


def test_ctrl_c_asks_workers_first_and_leaves_nothing(tmp_path: Path) -> None:
    mark = f"6{uuid.uuid4().int % 10**9:09}"
    trap = f"trap 'echo asked >> {tmp_path}/said; exit 1' TERM; sleep {mark} & wait; wait"
    code = f"""
        from thinwire.hosts.description import describe
        from thinwire.lab.run import Job, run
        run(Job(description=describe(hosts=3, rate="1gbit"), command=("sh", "-c", {trap!r})))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE)
    try:
        _wait_until(lambda: len(_processes(mark)) >= 3, "the lab to start")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert b"KeyboardInterrupt" in err
    assert (tmp_path / "said").read_text() == "asked\n" * 3
    _wait_until(lambda: not _processes(mark), "the processes to go")


def test_scripts_end_as_python_ends_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        textwrap.dedent("""
        import atexit, os, sys, threading
        rank = int(os.environ["RANK"])
        atexit.register(print, f"handler {rank}")
        threading.Timer(0.2, print, [f"thread {rank}"]).start()
        if rank == 1:
            sys.exit(5)
        if rank == 2:
            raise ValueError("wrong")
        if rank == 3:
            sys.exit("last words")
        print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
        """)
    )
    job = Job(
        description=describe(hosts=4, rate="1gbit"),
        command=(str(script), "-x"),
        keep_going=True,
        time_limit_s=200,
    )
    outcome = run(job)
    assert [worker.exit_code for worker in outcome.workers] == [0, 5, 1, 1]
    out, err = capfd.readouterr()
    assert "[host0] __main__ ['-x'] True\n" in out
    for rank in range(4):
        assert f"[host{rank}] thread {rank}\n" in out
        assert f"[host{rank}] handler {rank}\n" in out
    assert "[host3] last words\n" in err
    trace = [line for line in err.splitlines() if line.startswith("[host2]")]
    assert trace[1] == f'[host2]   File "{script}", line 9, in <module>'
    assert trace[-1] == "[host2] ValueError: wrong"


def _ordinary_user() -> tuple[list[str], str, dict[str, str]]:
    """Return a command prefix to become an ordinary user, a Python that user may run, and its environment."""
    if os.geteuid() != 0:
        return [], sys.executable, dict(os.environ)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv to become an ordinary user with")
    user = [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    user.append("env")  # setpriv itself may still run what the user may not
    paths = os.pathsep.join([str(SOURCE), *(path for path in sys.path if path.endswith("-packages"))])
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "HOME": "/tmp"}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        attempt = [*user, python, "-c", "import thinwire.lab.run"]
        done = subprocess.run(attempt, check=False, env=environment, capture_output=True, cwd="/")
        if done.returncode == 0:
            return user, python, environment
    pytest.skip("no Python here that an ordinary user may run")


def test_an_ordinary_user_can_have_a_lab() -> None:
    user, python, environment = _ordinary_user()
    code = """
        import os
        from thinwire.hosts.description import describe
        from thinwire.lab.run import Job, run
        assert os.geteuid() != 0
        outcome = run(Job(description=describe(hosts=2, rate="1gbit"), command=("ip", "-o", "-4", "addr")))
        assert outcome.exit_code == 0
    """
    command = [*user, python, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, cwd="/", timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "10.77.0.2/16" in done.stdout


@pytest.mark.timeout(300)
def test_killed_as_an_ordinary_user_nothing_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    user, python, environment = _ordinary_user()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir("/")
    for _ in range(10):
        mark = f"6{uuid.uuid4().int % 10**9:09}"
        _start_and_kill([*user, *_runner(python, mark)], mark)
