"""HTTPS of the daemon, with certificates that openssl made."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from infd.chat.client import ChatClient
from infd.errors import NotAnswered
from infd.sockets.tls import client_context as tls_client_context
from infd.sockets.tls import failed_handshake

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")


class Authority:
    """A certificate authority, and certificates that it signed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate = directory / "ca.pem"
        self._openssl("req", "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")

    def sign(self, name: str) -> tuple[Path, Path]:
        """Return the files of a certificate for localhost and of its key."""
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        subject = ("-subj", f"/CN={name}", *signed, "-addext", "basicConstraints=critical,CA:FALSE")
        self._openssl("req", "-x509", "-keyout", f"{name}.key", "-out", f"{name}.pem", *subject)
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "1")
        subprocess.run(["openssl", *arguments, *keys], cwd=self.directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def settings(certificate: tuple[Path, Path], **others: object) -> list[str]:
    values = {"tls_certificate": certificate[0], "tls_key": certificate[1], **others}
    return [part for name, value in values.items() for part in ("--set", f"server.{name}={value}")]


def client_context(authority: Authority, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def ask(daemon: Daemon, context: ssl.SSLContext) -> tuple[int, str]:
    """Complete a prompt over HTTPS; return the status and the common name of the server's certificate."""
    connection = http.client.HTTPSConnection(*daemon.address, timeout=60, context=context)
    try:
        body = {"model": "embedded", "prompt": "once", "max_tokens": 3}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert isinstance(connection.sock, ssl.SSLSocket)
        seen = connection.sock.getpeercert()
        assert seen is not None
        answer.read()
        return answer.status, seen["subject"][0][0][1]
    finally:
        connection.close()


def test_requests_are_answered_over_tls_and_a_new_certificate_leaves_open_connections_alone(
    start_daemon: Start, authority: Authority
) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    served = tuple(path.with_name(f"served{path.suffix}") for path in first)
    for source, target in zip(first, served, strict=True):
        shutil.copy(source, target)
    daemon = start_daemon(*settings((served[0], served[1]))).ready()
    assert daemon.log("listening")["address"].startswith("https://")
    context = client_context(authority)
    assert ask(daemon, context) == (200, "first")

    with (
        socket.create_connection(daemon.address, timeout=60) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as kept,
    ):
        for source, target in zip(second, served, strict=True):
            shutil.copy(source, target)
        daemon.signal(signal.SIGHUP)
        daemon.wait_for("RELOADING", "1")
        while daemon.notified[-1].get("READY") != "1":
            assert daemon.read_notification()
        assert ask(daemon, context) == (200, "second")
        kept.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_reload_with_a_broken_certificate_keeps_the_old_one(start_daemon: Start, authority: Authority) -> None:
    certificate = authority.sign("kept")
    daemon = start_daemon(*settings(certificate)).ready()
    before = certificate[0].read_text()
    certificate[0].write_text("no PEM")
    daemon.signal(signal.SIGHUP)
    daemon.wait_for("RELOADING", "1")
    while daemon.notified[-1].get("READY") != "1":
        assert daemon.read_notification()
    certificate[0].write_text(before)

    assert "server.tls_certificate" in daemon.log_text()
    assert ask(daemon, client_context(authority)) == (200, "kept")


def test_only_clients_of_the_authority_are_let_in(start_daemon: Start, authority: Authority) -> None:
    daemon = start_daemon(*settings(authority.sign("server"), tls_client_ca=authority.certificate)).ready()

    assert ask(daemon, client_context(authority, authority.sign("client"))) == (200, "server")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(daemon, client_context(authority))
    assert ask(daemon, client_context(authority, authority.sign("client"))) == (200, "server")  # then it is logged
    refused = daemon.log("TLS handshake failed")
    assert refused["peer"] == "127.0.0.1"
    assert refused["reason"] == "the client showed no certificate, which server.tls_client_ca asks for"
    assert refused["level"] == "warning"


def test_plain_http_at_a_port_with_tls_is_logged_and_others_are_served(
    start_daemon: Start, authority: Authority
) -> None:
    daemon = start_daemon(*settings(authority.sign("server"))).ready()

    with socket.create_connection(daemon.address, timeout=60) as plain:
        plain.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(65536)
    for _ in range(3):
        with socket.create_connection(daemon.address, timeout=60):
            pass  # as a load balancer's probe
        with pytest.raises(ssl.SSLError):
            ask(daemon, ssl.create_default_context())
    assert ask(daemon, client_context(authority)) == (200, "server")
    refused = daemon.log("TLS handshake failed")  # one line in 10 s
    assert refused["reason"].endswith("for example, plain HTTP")


def test_infds_own_clients_show_a_certificate_or_name_the_missing_option(
    start_daemon: Start, authority: Authority
) -> None:
    daemon = start_daemon(*settings(authority.sign("server"), tls_client_ca=authority.certificate)).ready()
    certificate, key = authority.sign("client")
    told = []
    for options in (
        {},
        {"authority": authority.certificate},
        {"authority": authority.certificate, "certificate": certificate, "key": key},
    ):
        given = {"authority": None, "certificate": None, "key": None, **options}
        tls = tls_client_context(insecure=False, **{name: path and str(path) for name, path in given.items()})
        try:
            told += ChatClient("https://localhost:{1}".format(*daemon.address), tls=tls).models()
        except NotAnswered as error:
            told.append(str(error))

    assert "certificate is not trusted" in told[0]
    assert "--cacert" in told[0]
    assert "--cert and --key" in told[1]
    assert told[2:] == ["embedded"]
    with socket.create_connection(daemon.address, timeout=60) as plain, pytest.raises(ssl.SSLError) as refused:
        client_context(authority).wrap_socket(plain, server_hostname="other.example")
    assert "is for another host" in failed_handshake(refused.value)
    assert "'other.example'" in failed_handshake(refused.value)


def test_versions_and_ciphers_are_those_of_the_settings(start_daemon: Start, authority: Authority) -> None:
    certificate = authority.sign("ciphers")
    daemon = start_daemon(*settings(certificate, tls_ciphers="ECDHE-ECDSA-AES256-GCM-SHA384")).ready()
    excluded = client_context(authority)
    excluded.maximum_version = ssl.TLSVersion.TLSv1_2
    excluded.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    with pytest.raises(ssl.SSLError):
        ask(daemon, excluded)
    newest = start_daemon(*settings(certificate, tls_min_version="1.3")).ready()
    older = client_context(authority)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        ask(newest, older)

    assert ask(newest, client_context(authority))[0] == 200


def test_a_body_that_is_refused_ends_in_an_answer(start_daemon: Start, authority: Authority) -> None:
    daemon = start_daemon(*settings(authority.sign("refusing"))).ready()
    with (
        socket.create_connection(daemon.address, timeout=60) as raw,
        client_context(authority).wrap_socket(raw, server_hostname="localhost") as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{")
        answer = client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()
    assert "Traceback" not in daemon.log_text()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tls_ciphers", "NO-SUCH-CIPHER", "NO-SUCH-CIPHER"),
        ("tls_client_ca", "/nowhere", "server.tls_client_ca: /nowhere: No such file"),
        ("tls_key", "/nowhere", "server.tls_key: "),
    ],
)
def test_settings_that_cannot_be_kept_are_named_at_start(
    start_daemon: Start, authority: Authority, name: str, value: str, reason: str
) -> None:
    daemon = start_daemon(*settings(authority.sign("bad"), **{name: value}))

    assert daemon.exit_code() == 78
    assert reason in daemon.log_text()


def test_plain_text_and_stalled_handshakes_harm_no_connection(start_daemon: Start, authority: Authority) -> None:
    options = settings(authority.sign("stalled"), header_timeout_s=1)
    daemon = start_daemon(*options).ready()
    with (
        socket.create_connection(daemon.address, timeout=60) as plain,
        socket.create_connection(daemon.address) as idle,
    ):
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ask(daemon, client_context(authority)) == (200, "stalled")
        idle.settimeout(60)
        assert idle.recv(1) == b"", "a handshake that does not begin ends with header_timeout_s"
    assert "Traceback" not in daemon.log_text()
