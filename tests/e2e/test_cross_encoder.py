"""A cross-encoder as a daemon: its scores over HTTP are those of transformers, which CrossEncoder of
sentence-transformers passes through the sigmoid; keys and rates hold as for generation.
"""

from __future__ import annotations

import os
import random
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch
from tokenizers import Tokenizer

from tests.e2e.process import served
from tests.e2e.word_tokenizer import SPECIAL, write_tokenizer
from tests.models.encoding import VOCAB, make, oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

HEAD = "AutoModelForSequenceClassification"
WORDS = [f"w{number}" for number in range(VOCAB - 4)]
QUERY = "w1 w2 w3"
DOCUMENTS = [" ".join(random.Random(seed).choices(WORDS, k=1 + seed * 3 % 40)) for seed in range(12)]
KEYS = {"plain": "", "limited": " requests_per_minute=2"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make("xlm-roberta", tmp_path_factory.mktemp("cross"), HEAD, num_labels=1, pad_token_id=1)
    write_tokenizer(directory, WORDS, SPECIAL, enclosed=True, most_tokens=100)
    return directory


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("daemon")
    keys = directory / "keys"
    keys.write_text("".join(f"{name}:{sha256(name.encode()).hexdigest()}{rest}\n" for name, rest in KEYS.items()))
    os.chmod(keys, 0o600)
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"]
    with served(directory, [*arguments, "--set", f"server.api_key_file={keys}"]) as url:
        yield url


def post(url: str, body: dict[str, Any], key: str = "plain") -> requests.Response:
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def logits(checkpoint: Path) -> list[float]:
    """Return the logit of QUERY with each document."""
    tokenizer, model = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), oracle(checkpoint, HEAD)
    with torch.inference_mode():
        pairs = [tokenizer.encode(QUERY, each).ids for each in DOCUMENTS]
        return [model(torch.tensor([pair])).logits[0, 0].item() for pair in pairs]


def test_scores_and_ranks_are_those_of_the_reference(url: str, logits: list[float]):
    scores = torch.tensor(logits).sigmoid().tolist()
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)

    data = post(f"{url}/score", {"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    assert [each["score"] for each in data] == pytest.approx(scores, abs=2e-5)
    ranked = post(f"{url}/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [each["index"] for each in ranked] == order
    assert [each["relevance_score"] for each in ranked] == pytest.approx([scores[each] for each in order], abs=2e-5)
    raw = post(f"{url}/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    assert {each["index"]: each["score"] for each in raw} == pytest.approx(dict(enumerate(logits)), abs=1e-4)
    predicted = post(f"{url}/predict", {"inputs": [[QUERY, each] for each in DOCUMENTS]}).json()
    assert [each[0]["score"] for each in predicted] == pytest.approx(scores, abs=2e-5)


def test_keys_and_rates_hold(url: str):
    body = {"query": QUERY, "documents": DOCUMENTS[:2]}
    assert post(f"{url}/rerank", body, "unknown").status_code == 401
    assert [post(f"{url}/rerank", body, "limited").status_code for _ in range(3)] == [200, 200, 429]
    assert post(f"{url}/score", {"text_1": "w1", "text_2": "w2"}, "limited").status_code == 429
    assert post(f"{url}/rerank", body).status_code == 200
