"""The file that lets a worker into the TLS connections of a run: private key, certificate and authority.

All workers have the same file. Its authority has signed this one certificate and its key is gone, so whoever
shows a certificate of this authority holds the file.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import DataError

_MAKE = "make one with `thinwire keys new --tls FILE.key`, and copy it to every worker"
_SUFFIX = ".pem"
_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

_CONFIG = """
[req]
distinguished_name = name
x509_extensions = authority
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
subjectKeyIdentifier = hash
[worker]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
"""
"""A configuration of our own: that of the host may be missing, or say something else."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The `ssl` contexts of connections, one for each end. TLS 1.3 only; both sides show a certificate."""

    client: ssl.SSLContext
    server: ssl.SSLContext


@dataclass(frozen=True, kw_only=True, slots=True)
class TLS:
    """Settings of `wire="tls"`."""

    file: str = ""
    """The run's certificate, as `thinwire keys new --tls` makes it; by default THINWIRE_TLS_FILE, and else
    the file beside the run's key that ends in .pem."""

    def path(self, key_file: str = "") -> Path:
        """The place of the certificate; `key_file`: the run's key, by default THINWIRE_KEY_FILE."""
        if named := self.file or os.environ.get("THINWIRE_TLS_FILE", ""):
            return Path(named)
        if key := key_file or os.environ.get("THINWIRE_KEY_FILE", ""):
            return beside(Path(key))
        raise DataError(
            "wire='tls' needs the certificate of the run, and neither TLS(file=...), THINWIRE_TLS_FILE nor a "
            "key file says where it is",
            hint=_MAKE,
        )


def beside(key: Path) -> Path:
    """The certificate that belongs to a run's key."""
    return key.with_suffix(_SUFFIX)


def load(path: Path) -> Contexts:
    """Contexts from a file; DataError if it is missing, damaged, expired or not of one piece."""
    client, server = (ssl.SSLContext(each) for each in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
    client.check_hostname = False  # a certificate stands for the run, not for a host
    server.num_tickets = 0  # nothing is ever sent back to who connects: see connection.py
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(path)
            context.load_verify_locations(path)
        except FileNotFoundError as error:
            raise DataError(
                f"{path} does not exist: it is to hold the certificate of the run", hint=_MAKE
            ) from error
        except OSError as error:  # ssl.SSLError is one
            raise DataError(
                f"{path} holds no private key with its certificate: {error}", hint=_MAKE
            ) from error
    _check_dates(path, client)
    return Contexts(client, server)


def _check_dates(path: Path, context: ssl.SSLContext) -> None:
    authorities = context.get_ca_certs()
    if not authorities:
        raise DataError(f"{path} holds no certificate of an authority", hint=_MAKE)
    now_s, format_ = time.time(), "%Y-%m-%d %H:%M UTC"
    for each in authorities:
        until_s, from_s = (ssl.cert_time_to_seconds(str(each[name])) for name in ("notAfter", "notBefore"))
        if now_s > until_s:
            when = time.strftime(format_, time.gmtime(until_s))
            raise DataError(f"the certificate in {path} has expired on {when}", hint=_MAKE)
        if now_s < from_s:
            when = time.strftime(format_, time.gmtime(from_s))
            raise DataError(
                f"the certificate in {path} is valid from {when}, and the clock of this host says "
                f"{time.strftime(format_, time.gmtime(now_s))}",
                hint="set the clock of this host, or of the one that made the certificate",
            )


def make(path: Path, *, days: int) -> None:
    """Make an authority and one certificate with the `openssl` command, in a file only its owner can read.

    The authority's key is not kept.
    """
    if path.exists():
        raise DataError(f"{path} exists", hint="name another file, or remove it first")
    with tempfile.TemporaryDirectory(prefix="thinwire-") as made:
        folder = Path(made)
        (folder / "config").write_text(_CONFIG)
        config, lasts = ["-config", "config"], ["-days", str(days)]
        signer = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"]
        names = [[*_CURVE, "-subj", f"/CN=thinwire {each}"] for each in ("run authority", "worker")]
        extended = ["-extfile", "config", "-extensions", "worker"]
        for words in (
            ["req", "-x509", *config, *names[0], *lasts, "-keyout", "authority.key", "-out", "authority.pem"],
            ["req", "-new", *config, *names[1], "-keyout", "worker.key", "-out", "request.pem"],
            ["x509", "-req", "-in", "request.pem", *signer, *lasts, *extended, "-out", "worker.pem"],
        ):
            _openssl(folder, *words)
        files = ("worker.key", "worker.pem", "authority.pem")
        text = "".join((folder / name).read_text() for name in files)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _openssl(folder: Path, *words: str) -> None:
    try:
        done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        hint = "install the package openssl on this host (workers do not need it), or make the file elsewhere"
        raise DataError(
            f"certificates are made by the command openssl, which does not run: {error}", hint=hint
        ) from error
    if done.returncode:
        raise DataError(f"openssl {words[0]} failed: {done.stderr.strip()[-500:]}")
