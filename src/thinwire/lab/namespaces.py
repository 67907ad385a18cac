"""Linux namespaces: how to enter new ones, and what is missing where that is not allowed; no torch.

The lab runs as the first process of a pid namespace, so that the kernel ends everything in it when that
process ends. Hosts are unnamed network namespaces: only open files refer to them, so none is left behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.errors import UsageError

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_PATHS = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Where ip and tc live; an ordinary user's PATH often lacks the first two."""

_TEST_SCRIPT = """
ip link add test0 type bridge && ip link add test1 type veth peer name test2 &&
tc qdisc add dev test1 root tbf rate 1mbit burst 16kb limit 64kb
"""
_REPLACE_HOSTS = """
mount -t tmpfs none /mnt
cat > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
"""


def find_tool(name: str) -> str:
    """Return the full path of a system tool."""
    if found := _which(name):
        return found
    package = "util-linux" if name == "unshare" else "iproute2"
    raise UsageError(f"the lab needs `{name}`, which is not installed", hint=f"apt-get install {package}")


def _which(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_PATHS)


def enter_command() -> list[str]:
    """Return the command that starts another command inside new namespaces.

    Tried in this order: as root, through a user namespace (rootless), and both without a /proc of its own
    (containers often forbid that). Raises UsageError saying what is missing when none works.
    """
    unshare, _, _ = map(find_tool, ("unshare", "ip", "tc"))
    common = [unshare, "--net", "--mount", "--pid", "--fork", "--kill-child"]
    rootless = ["--user", "--map-root-user"]
    refusals = []
    for extra in (["--mount-proc"], []):
        for user in ([], rootless) if os.geteuid() == 0 else (rootless,):
            command = [*common, *user, *extra]
            refusal = _refusal(command)
            if refusal is None:
                # The lab ends by itself when our end of its channel closes; the signal is for a lab too
                # stuck to notice.
                setpriv = _which("setpriv")
                return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command
            refusals.append(f"`{' '.join(command[1:])}`: {refusal}")
    raise UsageError("this machine does not allow network namespaces\n" + "\n".join(refusals), hint=_advice())


def _refusal(command: list[str]) -> str | None:
    """Return why `command` cannot create a shaped path, or None if it can."""
    done = run_tool([*command, "sh", "-ec", _TEST_SCRIPT])
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def run_tool(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a system tool with `text` on its standard input, and capture its output."""
    return subprocess.run(
        command, input=text, text=True, capture_output=True, check=False, timeout=30, env=tool_environment()
    )


def tool_environment() -> dict[str, str]:
    """Return the environment with the system tools on the PATH."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_PATHS}"}


def _advice() -> str:
    for setting, bad, good in (
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("user.max_user_namespaces", "0", "10000"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        path = Path("/proc/sys", *setting.split("."))
        if path.exists() and path.read_text().strip() == bad:
            return f"as root: sysctl {setting}={good}"
    return (
        "run as root, or in a container started with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined; the kernel needs bridge, veth and sch_tbf"
    )


def _call(name: str, *arguments: int) -> None:
    # Python has os.unshare and os.setns from 3.12 on.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def new_network() -> int:
    """Create a network namespace and return an open file that refers to it; this thread stays in its own."""
    with inside_network(None):
        return _open_network()


@contextmanager
def inside_network(namespace: int | None) -> Iterator[None]:
    """Enter another network namespace (None: a new one) for a while, with the processes started meanwhile."""
    home = _open_network()
    try:
        if namespace is None:
            _call("unshare", _CLONE_NEWNET)
        else:
            _call("setns", namespace, _CLONE_NEWNET)
        yield
    finally:
        _call("setns", home, _CLONE_NEWNET)
        os.close(home)


def _open_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_host(namespace: int, name: str) -> None:
    """Move this process into a host's network for good, and give it the host's name."""
    _call("setns", namespace, _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)


def replace_hosts_file(names: dict[str, str]) -> None:
    """Make names resolve to addresses through /etc/hosts inside the lab; the real file is not touched."""
    lines = ["127.0.0.1 localhost"]
    for name, address in names.items():
        # Sockets for both protocols look up IPv4 addresses as ::ffff:address.
        lines += [f"{address} {name}", f"::ffff:{address} {name}.lab"]
    run_tool(["sh", "-ec", _REPLACE_HOSTS], "\n".join(lines))  # without it, only lookups by name fail
