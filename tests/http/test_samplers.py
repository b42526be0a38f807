"""The fields of llama.cpp's samplers: what they become, and which values are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd.errors import InvalidRequest, Unsupported
from infd.http import samplers
from infd.request import Breakers, Chain, Dry, Mirostat
from infd.text.breakers import BreakerIndex
from tests.http.test_sampling import params

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
ALL = {
    "typical_p": 0.9,
    "top_n_sigma": 2,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 1.5,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", "a b"],
    "mirostat": 2,
    "mirostat_tau": 4,
    "mirostat_eta": 0.2,
}


def test_fields_left_out_or_neutral_change_nothing():
    neutral = {
        "typical_p": 1,
        "top_n_sigma": -1,
        "xtc_probability": 0,
        "dynatemp_range": 0,
        "dry_multiplier": 0,
        "dry_base": 3,
        "dry_allowed_length": 7,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ["x"],
        "mirostat": 0,
        "mirostat_tau": 1,
        "mirostat_eta": 1,
        "xtc_threshold": 0.3,
        "dynatemp_exponent": 2,
    }
    assert params(seed=1, **neutral) == params(seed=1)
    assert params(xtc_probability=1, xtc_threshold=0.51).chain is None


def test_each_sampler_has_its_parameters():
    assert params(typical_p=0.5).chain == Chain(typical_p=0.5)
    assert params(top_n_sigma=1.5).chain == Chain(top_n_sigma=1.5)
    assert params(xtc_probability=0.5).chain == Chain(xtc_probability=0.5, xtc_threshold=0.1)
    assert params(dynatemp_range=0.5, dynatemp_exponent=2).chain == Chain(dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert params(dry_multiplier=0.8).dry == Dry(0.8, 1.75, 2, 64, Breakers())
    assert params(dry_multiplier=0.8, dry_base=0.5, dry_penalty_last_n=-1).dry == Dry(0.8, 1.75, 2, None, Breakers())
    assert params(dry_multiplier=0.8, dry_penalty_last_n=0).dry is None
    assert params(mirostat=1).mirostat == Mirostat(1, 5.0, 0.1)
    assert params(mirostat=2, mirostat_tau=3, mirostat_eta=0).mirostat == Mirostat(2, 3.0, 0.0)


def test_samplers_that_are_not_listed_are_off():
    everything = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2, "typical_p": 0.5, "temperature": 0.5}
    found = params(**everything, dry_multiplier=1, samplers=["top_k", "temperature"])
    assert (found.top_k, found.top_p, found.min_p, found.repetition_penalty, found.dry) == (5, 1.0, 0.0, 1.0, None)
    assert (found.chain, found.temperature) == (Chain(), 0.5)
    found = params(**everything, samplers=["penalties", "typical_p", "top-p", "min_p"])
    assert (found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (0, 0.5, 0.1, 2.0)
    assert (found.chain, found.temperature) == (Chain(typical_p=0.5), 1.0)
    assert params(samplers=list(samplers.CHAIN)).chain == Chain()


@pytest.mark.parametrize("names", [["temperature", "top_k"], ["top_k", "top_k"], ["infill"], ["adaptive_p"]])
def test_other_orders_and_unknown_samplers_are_refused(names):
    with pytest.raises(Unsupported) as refused:
        params(samplers=names)
    assert refused.value.param == "samplers"


def test_a_dynamic_temperature_needs_a_temperature():
    with pytest.raises(InvalidRequest) as refused:
        params(dynatemp_range=0.5, temperature=0)
    assert refused.value.param == "dynatemp_range"


@pytest.mark.parametrize("route", ROUTES)
async def test_every_api_serves_them(endpoint: Endpoint, route: str):
    for field, value in ALL.items():
        assert (await endpoint.post(route, {**ROUTES[route], field: value}))[0] == 200, field
    assert (await endpoint.post(route, {**ROUTES[route], **ALL}))[0] == 200
    for field in ALL:
        status, body = await endpoint.post(
            route, {**ROUTES[route], field: -5 if field != "dry_sequence_breakers" else [""]}
        )
        assert (status, field in body["error"]["message"]) == (400, True)


async def test_too_many_breakers_are_refused(endpoint: Endpoint):
    said = {**ROUTES["/v1/completions"], "dry_multiplier": 1}
    status, body = await endpoint.post("/v1/completions", {**said, "dry_sequence_breakers": ["ü" * 40] * 4})
    assert (status, body["error"]["param"]) == (400, "dry_sequence_breakers")


def heads(*ids: int) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in ids)


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


def test_breakers_are_the_tokens_that_contain_or_begin_the_strings():
    index = BreakerIndex([b"a", b"xab", b"abc", b"", b"\xff", b"ab", b"cab x", b"b"], encode)
    assert index.find(("ab",)) == Breakers((heads(1, 2, 5, 6), heads(0)), ((ord("b"),),))
    assert index.find(("abc", "ab c")) == Breakers(
        (heads(2), heads(0), heads(1, 5), heads(0), heads(1, 5)),
        (tuple(encode("bc")), tuple(encode("c")), tuple(encode("b c")), tuple(encode(" c"))),
    )
    assert index.find(()) == Breakers((b"",), ())
    assert index.known(("ab",)) == index.find(("ab",))
    assert index.known(("b",)) is None


def test_more_tails_than_the_kernels_take_are_refused():
    index = BreakerIndex([b"a"], lambda text: [len(text)])
    strings = tuple("a" + "b" * length for length in range(1, 40))
    with pytest.raises(InvalidRequest):
        index.find(strings)
