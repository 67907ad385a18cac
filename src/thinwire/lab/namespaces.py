"""Namespaces: how to enter a world of our own, and what is missing where that is not allowed; no torch.

The lab runs as the first process of a pid namespace, so that the kernel ends everything in it when that
one ends. Hosts are network namespaces without a name: only open files refer to them, none stays behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.errors import UsageError

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_PATHS = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Where ip and tc live; an ordinary user's PATH often lacks the first two."""

_TRY = """
ip link add try0 type bridge && ip link add try1 type veth peer name try2 &&
tc qdisc add dev try1 root tbf rate 1mbit burst 16kb limit 64kb
"""
_REPLACE_HOSTS = """
mount -t tmpfs none /mnt
cat > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
"""


def find_tool(name: str) -> str:
    """The full path of a system tool."""
    found = shutil.which(name) or shutil.which(name, path=_PATHS)
    if found is None:
        package = "util-linux" if name == "unshare" else "iproute2"
        raise UsageError(f"the lab needs `{name}`, which is not installed", hint=f"apt-get install {package}")
    return found


def enter_command() -> list[str]:
    """The command that starts another command inside a world of its own.

    Tried in this order: as root, through a user namespace (rootless), and both without a /proc of its own
    (containers often forbid that). Raises UsageError saying what is missing when none works.
    """
    unshare = find_tool("unshare")
    for tool in ("ip", "tc"):
        find_tool(tool)
    common = [unshare, "--net", "--mount", "--pid", "--fork", "--kill-child"]
    rootless = ["--user", "--map-root-user"]
    refusals = []
    for extra in (["--mount-proc"], []):
        for who in ([], rootless) if os.geteuid() == 0 else (rootless,):
            command = [*common, *who, *extra]
            refusal = _refusal(command)
            if refusal is None:
                return [*_die_with_parent(), *command]
            refusals.append(f"`{' '.join(command[1:])}`: {refusal}")
    raise UsageError(
        "this machine does not let us make network namespaces\n" + "\n".join(refusals), hint=_advice()
    )


def _die_with_parent() -> list[str]:
    # The lab ends by itself when our end of its channel closes. This is for a lab too stuck to notice.
    setpriv = shutil.which("setpriv") or shutil.which("setpriv", path=_PATHS)
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def _refusal(command: list[str]) -> str | None:
    """Why `command` cannot make a shaped path, or None if it can."""
    done = subprocess.run(
        [*command, "sh", "-ec", _TRY],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env=tool_environment(),
    )
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def tool_environment() -> dict[str, str]:
    """The environment with the system tools on the PATH."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_PATHS}"}


def _advice() -> str:
    asked = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (bad, remedy) in asked.items():
        try:
            with open(path) as file:
                if file.read().strip() == bad:
                    return f"as root: {remedy}"
        except OSError:
            continue
    return (
        "run as root, or in a container started with --cap-add SYS_ADMIN --cap-add NET_ADMIN "
        "--security-opt seccomp=unconfined; the kernel needs bridge, veth and sch_tbf"
    )


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def new_network() -> int:
    """Make a network namespace and return an open file that stands for it; we stay where we are."""
    home = this_network()
    _call("unshare", _CLONE_NEWNET)
    made = this_network()
    enter_network(home)
    os.close(home)
    return made


def this_network() -> int:
    """An open file that stands for the network namespace of this thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_network(namespace: int) -> None:
    """Move this thread into a network namespace, for good."""
    _call("setns", namespace, _CLONE_NEWNET)


@contextmanager
def inside_network(namespace: int) -> Iterator[None]:
    """Be in another network namespace for a while, with the processes started meanwhile."""
    home = this_network()
    enter_network(namespace)
    try:
        yield
    finally:
        enter_network(home)
        os.close(home)


def enter_host(namespace: int, name: str) -> None:
    """Move this process into a host's network, and let it have the host's name."""
    enter_network(namespace)
    _call("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)


def know_hosts(names: dict[str, str]) -> bool:
    """Let everyone in here find these names (to address) in /etc/hosts; the real file is not touched.

    Says whether it worked: without it, only lookups by name fail.
    """
    lines = ["127.0.0.1 localhost"]
    for name, address in names.items():
        # Sockets that serve both protocols ask for the older one's addresses behind ::ffff:.
        lines += [f"{address} {name}", f"::ffff:{address} {name}.lab"]
    done = subprocess.run(
        ["sh", "-ec", _REPLACE_HOSTS], input="\n".join(lines), text=True, check=False, capture_output=True
    )
    return done.returncode == 0
