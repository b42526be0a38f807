"""A real daemon whose device is lost on the device thread."""

from __future__ import annotations

import http.client
import json
import os
from typing import TYPE_CHECKING

from tests.e2e.poisoned import POISON

if TYPE_CHECKING:
    from tests.e2e.test_pause import Start

DEVICE = ("--device", "cpu", "--set", "device.threads=1", "--set", "scheduler.step_tokens=256", "--dtype", "float32")


def test_a_lost_device_ends_streams_with_an_error_other_requests_with_500_and_the_daemon_with_70(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(*DEVICE, module="tests.e2e.poisoned").ready()
    with daemon.stream(prompt=[5, 17, 300, 41], max_tokens=2000, n=2) as events:
        lethal = http.client.HTTPConnection(*daemon.address, timeout=60)
        body = json.dumps({"model": "embedded", "prompt": [5, POISON, 41], "max_tokens": 4})
        lethal.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = lethal.getresponse()
        refused = json.loads(answer.read())
        lethal.close()
        *_, last = events
    assert "choices" in events.first
    assert "error" in last, json.dumps(last)
    assert events.done
    assert answer.status == 500, refused
    assert daemon.exit_code() == os.EX_SOFTWARE == 70
    assert "an uncorrectable error" in daemon.log_text()
