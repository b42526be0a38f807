"""The log of failed TLS handshakes. Handshakes themselves: tests/e2e/test_tls.py."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from infd.http.handshakes import QUIET_S, Handshakes
from infd.sockets.tls import refused_handshake
from infd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    import pytest


def test_one_line_is_logged_for_each_while_and_says_how_many_were_not(caplog: pytest.LogCaptureFixture):
    times = iter([100.0, 101.0, 101.0 + QUIET_S - 2, 100.0 + QUIET_S, 101.0 + QUIET_S])
    metrics = Metrics()
    handshakes = Handshakes(metrics, lambda: next(times))

    for number in range(5):
        handshakes.failed(f"10.0.0.{number}", ConnectionAbortedError("too slow"))

    lines = [vars(record) for record in caplog.records]
    assert [(line["peer"], line["reason"], line.get("unlogged")) for line in lines] == [
        ("10.0.0.0", "too slow", None),
        ("10.0.0.3", "too slow", 2),
    ]
    assert metrics.dropped["bad_handshake"] == 5


def test_a_tls_alert_of_the_client_is_distinguished_from_other_failures():
    unknown, other = ssl.SSLError(1, "x"), ssl.SSLError(1, "x")
    unknown.reason, other.reason = "TLSV1_ALERT_UNKNOWN_CA", "NO_SHARED_CIPHER"

    assert refused_handshake(unknown).startswith("the client does not trust this server's certificate")
    assert refused_handshake(other) == "no shared cipher"
