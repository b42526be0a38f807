"""An API beside OpenAI's needs only a schema, a conversion to Generation, and a format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.http import app
from infd.http.apis.api import Api
from infd.http.auth import Keys
from infd.http.generation import Generation, Texts
from infd.http.schema.sampling import GenerationFields
from tests.http.endpoint import serving
from tests.http.model import foretell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from infd.config import Config
    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta
    from infd.http.formats.base import Accepted
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.rates import Standing
    from infd.scheduler.plan import StepPlan
    from tests.http.endpoint import Endpoint

PATH = "/plain"
KEY = {"Authorization": "Bearer k"}
IDS = [5, 6, 7]


class PlainRequest(GenerationFields, kw_only=True):
    ids: list[int]
    length: int = 8


class PlainErrors:
    request_id_header = "X-Plain-Id"

    def error_body(self, error: RequestError) -> bytes:
        return msgspec.json.encode({"wrong": str(error), "status": error.status})

    def rate_headers(self, standings: Sequence[Standing]) -> dict[str, str]:
        return {"X-Plain-Limits": str(len(standings))}

    def error_events(self, error: RequestError) -> bytes:
        return b"wrong " + self.error_body(error) + b"\n"


class PlainFormat(PlainErrors):
    folds = False

    """Sends plain text, and counts the deltas."""

    def __init__(self, request: PlainRequest, accepted: Accepted) -> None:
        self._deltas = 0

    def error_events(self, error: RequestError) -> bytes:
        return b"after %d: " % self._deltas + super().error_events(error)

    def events(self, delta: ChoiceDelta) -> Pieces:
        self._deltas += 1
        return [delta.text.encode()]

    def last_events(self) -> bytes:
        return b"\nthe end\n"

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        return {}

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        (choice,) = choices
        return [msgspec.json.encode({"text": choice.delta.text})]


def generation(request: PlainRequest, body_bytes: int, config: Config) -> Generation:
    texts = Texts([request.ids])
    return Generation(fields=request, input=texts, prompt_param="ids", body_bytes=body_bytes, max_tokens=request.length)


PLAIN: Any = Api(msgspec.json.Decoder(PlainRequest), generation, PlainFormat, PlainErrors())


@pytest.fixture
async def plain(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    monkeypatch.setitem(app.APIS, PATH, PLAIN)
    async with serving(keys=Keys.of("k")) as endpoint:
        yield endpoint


async def streamed(endpoint: Endpoint, **fields: Any) -> tuple[int, str]:
    said = {"ids": IDS, "seed": 0, "stream": True, **fields}
    async with endpoint.session.post(PATH, json=said, headers=KEY) as response:
        return response.status, await response.text()


async def test_an_answer_has_the_terms_and_the_stream_end_of_its_api(plain: Endpoint):
    text = foretell(IDS, 8)[1]

    assert await plain.post(PATH, {"ids": IDS, "seed": 0}, **KEY) == (200, {"text": text})
    assert await streamed(plain) == (200, f"{text}\nthe end\n")


@pytest.mark.parametrize(
    ("fields", "headers", "status"),
    [
        ({"ids": IDS}, {}, 401),
        ({"length": 3}, KEY, 400),
        ({"ids": [10**6]}, KEY, 400),
        ({"ids": IDS, "length": 1000, "stream": True}, KEY, 400),
        ({"ids": IDS, "model": "another"}, KEY, 404),
    ],
)
async def test_a_refusal_has_the_error_shape_of_its_api(
    plain: Endpoint, fields: dict[str, Any], headers: dict[str, str], status: int
):
    got, body = await plain.post(PATH, fields, **headers)

    assert (got, body["status"]) == (status, status)
    assert body["wrong"]


async def test_an_error_within_a_stream_has_its_formats_shape_and_stream_end(plain: Endpoint):
    def fault(plan: StepPlan) -> None:
        if any(span.start > 8 for span in plan.spans):
            raise RuntimeError("broken")

    plain.executor.fault = fault
    status, text = await streamed(plain, length=20)

    assert status == 200
    text, _, wrong = text.partition("after ")
    assert foretell(IDS, 20)[1].startswith(text)
    count, _, body = wrong.partition(": wrong ")
    assert int(count) > 0
    assert msgspec.json.decode(body)["status"] == 500
    assert "[DONE]" not in body


async def test_other_paths_keep_openais_error_shape(plain: Endpoint):
    status, body = await plain.post("/v1/completions", {"prompt": IDS})

    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
