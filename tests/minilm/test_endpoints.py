"""all-MiniLM-L6-v2 through every endpoint equals transformers' BertModel, mean pooling and normalization."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import requests
import torch

from infd.hub.packages import find
from infd.runner.start.resolve import choose_dtype
from infd.weights.checkpoint import read_config
from tests.e2e.process import Daemon, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]

MODELS = Path(__file__).parents[2] / "build/test-data/infd/models"  # where `make test-data` puts it
LINE = "the cat sat on a mat while rain fell over the quiet town and nobody saw it leave again"
WORDS = LINE.split(" ")
TEXTS = [" ".join(WORDS[start % 9 :][: 1 + start % 10] * (1 + start % 4)) for start in range(24)]
LEAST_COSINE = 0.99999
# Every subject with every predicate; pairs of these sentences are alike in different degrees.
SENTENCES = [
    f"{subject} {predicate}"
    for subject in ("The old sailor", "A young doctor", "My neighbour's dog", "The central bank", "This small library")
    for predicate in (
        "crossed the bay in a storm.",
        "raised interest rates again, and nobody had expected it.",
        "slept.",
        "was open until midnight.",
        "examined the patient's broken arm before the ambulance arrived from the other side of the town.",
    )
]
PAIRS = [(a, b) for at, a in enumerate(SENTENCES) for b in SENTENCES[at + 1 :]][:200]

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    if (found := find("all-minilm-l6-v2", MODELS)) is None:
        pytest.skip("make test-data")
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Vectors:
    return embedded(checkpoint, TEXTS)


def embedded(checkpoint: Path, texts: Sequence[str]) -> Vectors:
    """Return transformers' embeddings, computed text by text."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModel.from_pretrained(checkpoint).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            found.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    return np.array(found, dtype=np.float32)


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"]
    with served(tmp_path_factory.mktemp("minilm"), arguments) as url:
        yield url


def post(url: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = requests.post(url, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def cosines(found: Any, expected: Vectors) -> Vectors:
    made = np.array(found, dtype=np.float32)
    return (made * expected).sum(1) / np.linalg.norm(made, axis=1) / np.linalg.norm(expected, axis=1)  # type: ignore[no-any-return]


def test_embeddings_are_the_references_alone_and_together(url: str, expected: Vectors):
    together = post(f"{url}/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})["data"]
    found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in together]
    assert cosines(found, expected).min() > LEAST_COSINE
    for number in (0, 7, 23):
        (alone,) = post(f"{url}/v1/embeddings", {"input": TEXTS[number]})["data"]
        assert cosines([alone["embedding"]], expected[number : number + 1])[0] > LEAST_COSINE
    assert cosines(post(f"{url}/embed", {"inputs": TEXTS}), expected).min() > LEAST_COSINE
    pooled = post(f"{url}/pooling", {"input": TEXTS})["data"]
    assert cosines([each["data"] for each in pooled], expected).min() > LEAST_COSINE


def test_200_pairs_of_sentences_are_ranked_as_the_reference_ranks_them(url: str, checkpoint: Path):
    assert rank_correlation(scored(url), reference_scores(checkpoint)) > 0.99999


def reference_scores(checkpoint: Path) -> Vectors:
    vectors = dict(zip(SENTENCES, embedded(checkpoint, SENTENCES), strict=True))
    return np.array([vectors[a] @ vectors[b] for a, b in PAIRS])


def scored(url: str) -> Vectors:
    first, second = zip(*PAIRS, strict=True)
    answer = post(f"{url}/score", {"text_1": first, "text_2": second})
    return np.array([each["score"] for each in answer["data"]])


def rank_correlation(a: Vectors, b: Vectors) -> float:
    """Return Spearman's coefficient."""
    ranks = [each.argsort().argsort() for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_by_default_embeddings_are_near_the_references_and_the_log_names_the_type(
    checkpoint: Path, expected: Vectors, tmp_path: Path
):
    daemon = Daemon(tmp_path, ["--model", str(checkpoint), "--device", "cpu", "--set", "device.threads=1"], {})
    try:
        host, port = daemon.ready().address
        data = post(f"http://{host}:{port}/v1/embeddings", {"input": TEXTS})["data"]
        halved = choose_dtype("auto", read_config(checkpoint), "cpu") == "bfloat16"
        assert cosines([each["embedding"] for each in data], expected).min() > 0.999
        assert rank_correlation(scored(f"http://{host}:{port}"), reference_scores(checkpoint)) > 0.999
        assert ("the checkpoint is in float32; " in daemon.log_text()) == halved
    finally:
        daemon.close()


def test_dimensions_are_the_first_numbers_normalized(url: str, expected: Vectors):
    data = post(f"{url}/v1/embeddings", {"input": TEXTS, "dimensions": 32})["data"]
    assert cosines([each["embedding"] for each in data], expected[:, :32]).min() > LEAST_COSINE
    assert np.allclose(np.linalg.norm([each["embedding"] for each in data], axis=1), 1, atol=1e-5)


def test_scores_are_cosines(url: str, expected: Vectors):
    similar = expected @ expected[3]
    scores = [each["score"] for each in post(f"{url}/score", {"text_1": TEXTS[3], "text_2": TEXTS})["data"]]
    assert np.allclose(scores, similar, atol=1e-4)
    sentences = {"source_sentence": TEXTS[3], "sentences": TEXTS}
    assert np.allclose(post(f"{url}/similarity", {"inputs": sentences}), similar, atol=1e-4)
    ranked = post(f"{url}/rerank", {"query": TEXTS[3], "documents": TEXTS, "top_n": 5})["results"]
    assert np.allclose([each["relevance_score"] for each in ranked], np.sort(similar)[::-1][:5], atol=1e-4)


def test_the_models_entry_lists_its_tasks_and_other_routes_are_refused(url: str):
    assert requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["tasks"] == ["embed", "token_embed", "score"]
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/classify": {"input": "a"},
    }.items():
        assert post(url + path, body, 400)["error"]["code"] == "unsupported_by_model"
    assert "maximum context length" in post(f"{url}/v1/embeddings", {"input": "cat " * 600}, 400)["error"]["message"]
    assert post(f"{url}/v1/embeddings", {"input": "cat " * 600, "truncate_prompt_tokens": -1})["usage"]["total_tokens"]
