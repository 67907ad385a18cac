"""Certificates and meshes for tests of TLS connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore

from thinwire.wire.tls.backend import TlsBackend
from thinwire.wire.tls.files import Contexts, load, make
from thinwire.wire.tls.meeting import meet
from thinwire.wire.tls.mesh import TlsMesh

T = TypeVar("T")
SOON_S = 60.0


def make_certificate(folder: Path, name: str = "run") -> Path:
    path = folder / f"{name}.pem"
    make(path, days=1)
    return path


def in_threads(call: Callable[[int], T], size: int) -> list[T]:
    """The results of a call by each of some workers, all at the same time; or the first error."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    if errors:
        raise errors[0]
    assert len(found) == size, "a worker hangs"
    return [found[rank] for rank in range(size)]


@contextmanager
def meshes(size: int, contexts: Contexts) -> Iterator[list[TlsMesh]]:
    """The ends of all workers of a world, in one process."""
    store = HashStore()
    made = in_threads(lambda rank: meet(store, rank, size, contexts, SOON_S), size)
    try:
        yield made
    finally:
        for mesh in made:
            mesh.abort()
        for mesh in made:
            mesh.join()


def backends(made: list[TlsMesh], lane: int = 1) -> list[TlsBackend]:
    return [TlsBackend(mesh, lane, range(len(made)), rank) for rank, mesh in enumerate(made)]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return load(make_certificate(tmp_path_factory.mktemp("tls")))
