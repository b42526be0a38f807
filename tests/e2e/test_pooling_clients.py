"""Clients that nobody here wrote read embeddings and ranks, of the null device, whose numbers are hashes."""

from __future__ import annotations

import asyncio
import gc
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("no_telemetry"),
    pytest.mark.filterwarnings("ignore"),  # of the clients' libraries
]

TEXTS = ["Paris is the capital of France.", "A circle is round.", "Where is Paris?"]
DIMENSIONS = 64


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    daemon = Daemon(tmp_path_factory.mktemp("null"), [], {})
    try:
        host, port = daemon.ready().address
        yield f"http://{host}:{port}"
    finally:
        daemon.close()


@pytest.fixture(autouse=True)
def sockets_closed() -> Iterator[None]:
    """Collect what clients without a close leave, sockets and a loop: later tests do not ignore warnings of these."""
    yield
    asyncio.set_event_loop(None)
    gc.collect()


@pytest.fixture(scope="module")
def known(address: str) -> list[list[float]]:
    """Return the embeddings of TEXTS, as the plainest request gets them."""
    import requests

    found: list[list[float]] = requests.post(f"{address}/embed", json={"inputs": TEXTS}, timeout=30).json()
    assert [len(each) for each in found] == [DIMENSIONS] * 3
    assert all(math.isclose(math.hypot(*each), 1, abs_tol=1e-6) for each in found)
    return found


def cosines(known: Sequence[Sequence[float]]) -> list[float]:
    """Return the cosines of the last text with each."""
    return [sum(a * b for a, b in zip(known[-1], each, strict=True)) for each in known]


def test_openai(address: str, known: list[list[float]]):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].tasks == [
            *("generate", "embed", "classify", "token_embed", "token_classify", "score")
        ]
        decoded = client.embeddings.create(model="embedded", input=TEXTS)  # the client asks for base64
        floats = client.embeddings.create(model="embedded", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="embedded", input=TEXTS[0], dimensions=8)
        ids = client.embeddings.create(model="embedded", input=[[5, 6], [7]])
        with pytest.raises(openai.BadRequestError, match="dimensions is at most 64"):
            client.embeddings.create(model="embedded", input="a", dimensions=65)

    for answer in (decoded, floats):
        assert [each.embedding for each in answer.data] == [pytest.approx(each, abs=1e-7) for each in known]
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 10
    length = math.hypot(*known[0][:8])
    assert short.data[0].embedding == pytest.approx([each / length for each in known[0][:8]], abs=1e-6)
    assert ids.usage.prompt_tokens == 3


def test_cohere(address: str, known: list[list[float]]):
    cohere = pytest.importorskip("cohere", reason="`make test-all` installs it")
    expected = cosines(known)
    order = sorted(range(3), key=lambda index: -expected[index])
    for client in (cohere.Client("none", base_url=address), cohere.ClientV2("none", base_url=address)):
        answer = client.rerank(model="embedded", query=TEXTS[-1], documents=TEXTS, top_n=2)
        assert [each.index for each in answer.results] == order[:2]
        assert [each.relevance_score for each in answer.results] == pytest.approx([expected[i] for i in order[:2]])
        assert answer.meta.billed_units.search_units == 1


def test_langchain(address: str, known: list[list[float]]):
    langchain = pytest.importorskip("langchain_openai", reason="`make test-all` installs it")
    embeddings = langchain.OpenAIEmbeddings(
        model="embedded", base_url=f"{address}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )

    assert embeddings.embed_documents(TEXTS) == [pytest.approx(each, abs=1e-6) for each in known]
    assert embeddings.embed_query(TEXTS[1]) == pytest.approx(known[1], abs=1e-6)


def test_litellm(address: str, known: list[list[float]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks GitHub
    litellm = pytest.importorskip("litellm", reason="`make test-all` installs it")
    given: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "none"}

    answer = litellm.embedding(model="openai/embedded", input=TEXTS, **given)
    assert [each["embedding"] for each in answer.data] == [pytest.approx(each, abs=1e-6) for each in known]
    for provider in ("jina_ai", "hosted_vllm"):
        ranked = litellm.rerank(
            model=f"{provider}/embedded", query=TEXTS[-1], documents=TEXTS, top_n=1, api_base=address, api_key="none"
        )
        assert [each["index"] for each in ranked.results] == [2], provider
        assert ranked.results[0]["relevance_score"] == pytest.approx(1)


def test_hugging_faces_client(address: str, known: list[list[float]]):
    hub = pytest.importorskip("huggingface_hub")

    def at(path: str) -> Any:
        return hub.InferenceClient(model=f"{address}{path}")

    assert at("/embed").feature_extraction(TEXTS[0]).tolist() == [pytest.approx(known[0], abs=1e-6)]
    cut = at("/embed").feature_extraction(TEXTS[0], truncate=True, truncation_direction="Left", normalize=True)
    assert cut.tolist() == [pytest.approx(known[0], abs=1e-6)]
    assert at("/similarity").sentence_similarity(TEXTS[-1], other_sentences=TEXTS) == pytest.approx(cosines(known))
    with pytest.raises(hub.errors.HfHubHTTPError, match="inputs is empty"):
        at("/embed").feature_extraction("")
