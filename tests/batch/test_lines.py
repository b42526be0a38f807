"""Lines of batch files: requests that are refused before they are sent, and records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infd.batch import lines
from infd.errors import InvalidRequest

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_a_body_is_sent_as_it_is_written():
    body = b'{"prompt":  "\xc3\xa9", "seed": 12345678901234567890, "stream": false}'

    request = lines.parse(b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %b}\n' % body)

    assert (request.custom_id, request.url, bytes(request.body)) == ("a", "/v1/completions", body)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"custom_id": None}, "custom_id"),
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 5}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "http://elsewhere/v1/completions"}, "url"),
        ({"url": "/a b"}, "url"),
        ({"url": "/a\r\nX: y"}, "url"),
        ({"body": [1]}, "object"),
        ({"body": {"stream": True}}, "stream"),
        ({"body": {"background": True}}, "background"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_the_reason(change: dict[str, object], named: str):
    with pytest.raises(InvalidRequest, match=named):
        lines.parse(json.dumps(LINE | change).encode())


@given(st.binary())
def test_any_bytes_are_a_request_or_refused(line: bytes):
    lines.custom_id(line)
    with pytest.raises(InvalidRequest):
        lines.parse(line)


@given(
    number=st.integers(1),
    name=st.text(),
    body=st.dictionaries(st.text(), st.integers()),
    indent=st.sampled_from([None, 1]),
)
def test_a_record_is_one_line_that_a_later_run_reads(number: int, name: str, body: dict[str, int], indent: int | None):
    name = name.encode("utf-8", "ignore").decode()
    text = json.dumps(body, indent=indent).encode()

    record = lines.answered(number, name, 200, "r", text)

    assert record.count(b"\n") == 1
    assert json.loads(record) == {
        "id": f"batch_req_{number}",
        "custom_id": name,
        "response": {"status_code": 200, "request_id": "r", "body": body},
        "error": None,
    }
