from __future__ import annotations

from hashlib import sha256

import pytest

from infd.errors import ConfigError, Unauthorized
from infd.http.auth import Keys


def line(name: str, secret: str, tenant: str = "") -> str:
    return f"{name}:{sha256(secret.encode()).hexdigest()}" + (f":{tenant}" if tenant else "")


def test_without_keys_nobody_is_asked_for_one():
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
