from __future__ import annotations

from contextlib import nullcontext
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

import pytest

from infd.admin.commands import VERBS
from infd.errors import ConfigError, Unauthorized
from infd.http.auth import Keys

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

# Paths at which other servers expose operators' actions to clients.
ELSEWHERE = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/shutdown",
)


def line(name: str, secret: str, tenant: str = "") -> str:
    return f"{name}:{sha256(secret.encode()).hexdigest()}" + (f":{tenant}" if tenant else "")


def test_without_configured_keys_none_is_required():
    assert Keys().identify(None) is None


def test_a_key_is_known_by_its_hash_and_shares_its_tenant():
    keys = Keys.parse(f"# comment\n\n{line('ann', 's1')}\n{line('bob', 's2', 'team')}\n", "keys")

    ann, bob = keys.identify("Bearer s1"), keys.identify("bearer s2")

    assert ann is not None
    assert bob is not None
    assert (ann.name, ann.tenant) == ("ann", "ann")
    assert (bob.name, bob.tenant) == ("bob", "team")


def test_options_follow_the_key():
    keys = Keys.parse(f"{line('ann', 's1', 'team')}  in_flight=8 priority=-3\n{line('bob', 's2')}", "keys")

    ann, bob = keys.identify("Bearer s1"), keys.identify("Bearer s2")

    assert ann is not None
    assert bob is not None
    assert (ann.tenant, ann.in_flight, ann.priority) == ("team", 8, -3)
    assert (bob.tenant, bob.in_flight, bob.priority) == ("bob", None, None)


@pytest.mark.parametrize("option", ["in_flight=0", "in_flight=many", "in_flight", "priority=", "prioriti=1", "8"])
def test_an_option_with_a_mistake_is_refused_naming_the_line(option: str):
    with pytest.raises(ConfigError, match=f"keys:1: '{option}' is no option"):
        Keys.parse(f"{line('ann', 's1')} {option}", "keys")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic s1", "s1", "Bearer \udcff"])
def test_anything_but_a_known_key_is_refused(header: str | None):
    with pytest.raises(Unauthorized):
        Keys.of("s1").identify(header)


@pytest.mark.parametrize("secret", ["s0", "s4", "s9", "unknown", "s4x", ""])
def test_whatever_is_sent_all_of_each_hash_is_compared_and_no_secret_is(secret: str, monkeypatch: pytest.MonkeyPatch):
    """Response times must reveal neither the matching key nor the length of a matching prefix."""
    keys = Keys.parse("\n".join(line(str(i), f"s{i}") for i in range(10)), "keys")
    compared: list[tuple[bytes, bytes]] = []

    def seen(known: bytes, sent: bytes) -> bool:
        compared.append((known, sent))
        return compare_digest(known, sent)

    monkeypatch.setattr("infd.http.auth.compare_digest", seen)
    with nullcontext() if secret in ("s0", "s4", "s9") else pytest.raises(Unauthorized):
        keys.identify(f"Bearer {secret}")

    sent = sha256(secret.encode()).digest()
    assert compared == ([(sha256(f"s{i}".encode()).digest(), sent) for i in range(10)] if secret else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann", "keys:1"),
        ("ann:abc", "keys:1"),
        (f"{line('ann', 's')}\n:{'0' * 64}", "keys:2"),
        (f"{line('ann', 's')}\n{line('ann', 't')}", "'ann' was given before"),
        ("# nothing\n", "leave the server open"),
    ],
)
def test_a_key_file_with_a_mistake_is_refused_naming_the_line(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        Keys.parse(text, "keys")


async def test_operator_verbs_are_not_reachable_over_http(endpoint: Endpoint):
    asked = {"lora_name": "a", "lora_path": "/etc", "name": "a", "path": "/etc", "id": "a"}

    for path in (*ELSEWHERE, *(verb.path for verb in VERBS if verb.mutates)):
        status, body = await endpoint.post(path, asked)
        assert (status, body["error"]["code"]) == (404, "unknown_path"), path

    assert endpoint.engine.status().state == "ready"
    assert not endpoint.engine.adapters.rows()
