"""bge-m3's kind of model as a daemon: its embedding, weights of tokens and ColBERT vectors over HTTP are
FlagEmbedding's, over the hidden states of transformers; its scores are those of the embeddings.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch
from torch.nn.functional import normalize

from tests.e2e.process import served
from tests.e2e.word_tokenizer import SPECIAL, write_tokenizer
from tests.models.encoding import VOCAB, make_m3, oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

WORDS = [f"w{number}" for number in range(VOCAB - 4)]
# Words recur in the longer texts. One text contains a token without a word, whose weight FlagEmbedding leaves out.
TEXTS = [
    *(" ".join(random.Random(seed).choices(WORDS, k=1 + seed * 9)) for seed in range(8)),
    "w1 w2 w1 unknown w3 w2",
]
ENDS = {0, 1, 2, 3}  # <s>, <pad>, </s>, <unk>


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_m3(tmp_path_factory.mktemp("m3"))
    write_tokenizer(directory, WORDS, SPECIAL, enclosed=True, most_tokens=100)
    return directory


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"]
    with served(tmp_path_factory.mktemp("daemon"), arguments) as url:
        yield url


def post(url: str, body: dict[str, Any]) -> Any:
    answer = requests.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def states(checkpoint: Path) -> list[tuple[list[int], Tensor]]:
    """Return the ids and the hidden states [tokens, 48] of each text."""
    from tokenizers import Tokenizer

    tokenizer, model = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), oracle(checkpoint)
    found = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert (ids[0], ids[-1]) == (0, 2)
        with torch.inference_mode():
            found.append((ids, model(torch.tensor([ids])).last_hidden_state[0]))
    return found


@pytest.fixture(scope="module")
def dense(states: list[tuple[list[int], Tensor]]) -> Tensor:
    """Return the embeddings [texts, 48], of length 1."""
    return normalize(torch.stack([hidden[0] for _, hidden in states]), dim=-1)


@pytest.fixture(scope="module")
def weights(checkpoint: Path, states: list[tuple[list[int], Tensor]]) -> list[list[float]]:
    """Return the weight of each token of each text, <s> and </s> included."""
    layer = torch.load(checkpoint / "sparse_linear.pt")
    return [(hidden @ layer["weight"].float().T + layer["bias"].float()).relu()[:, 0].tolist() for _, hidden in states]


def close(found: Any, expected: Any) -> bool:
    return (torch.tensor(found) - torch.as_tensor(expected)).abs().max().item() < 2e-5


def test_the_models_entry_lists_its_tasks(url: str):
    (card,) = requests.get(f"{url}/v1/models", timeout=60).json()["data"]

    assert card["tasks"] == ["embed", "token_embed", "token_classify", "score"]


def test_embeddings_are_those_of_the_first_token(url: str, dense: Tensor):
    embedded = post(f"{url}/v1/embeddings", {"input": TEXTS})["data"]

    assert close([each["embedding"] for each in embedded], dense)
    assert close(post(f"{url}/embed", {"inputs": TEXTS}), dense)
    assert close([each["data"] for each in post(f"{url}/pooling", {"input": TEXTS})["data"]], dense)


def test_colbert_vectors_leave_out_the_token_that_begins_a_text(
    url: str, checkpoint: Path, states: list[tuple[list[int], Tensor]]
):
    layer = torch.load(checkpoint / "colbert_linear.pt")
    found = post(f"{url}/pooling", {"input": TEXTS, "task": "token_embed"})["data"]

    for each, (ids, hidden) in zip(found, states, strict=True):
        expected = normalize(hidden[1:] @ layer["weight"].T + layer["bias"], dim=-1)
        assert len(each["data"]) == len(ids) - 1
        assert close(each["data"], expected)


def test_weights_of_tokens_leave_out_both_ends(
    url: str, states: list[tuple[list[int], Tensor]], weights: list[list[float]]
):
    found = post(f"{url}/pooling", {"input": TEXTS, "task": "token_classify"})["data"]

    for each, (ids, _), expected in zip(found, states, weights, strict=True):
        assert len(each["data"]) == len(ids) - 2
        assert close(each["data"], [[weight] for weight in expected[1:-1]])


def test_a_sparse_vector_has_the_largest_weight_of_each_token_that_is_not_special(
    url: str, states: list[tuple[list[int], Tensor]], weights: list[list[float]]
):
    found = post(f"{url}/embed_sparse", {"inputs": TEXTS})

    for each, (ids, _), by_token in zip(found, states, weights, strict=True):
        expected: dict[int, float] = {}
        for token, weight in zip(ids, by_token, strict=True):
            if token not in ENDS and weight > 0:
                expected[token] = max(weight, expected.get(token, 0))
        assert {value["index"]: value["value"] for value in each} == pytest.approx(expected, abs=2e-5)
        assert len(each) == len(expected)
    assert any(len({*ids}) < len(ids) - 1 for ids, _ in states), "no token recurs"


def test_scores_and_ranks_are_the_cosines_of_embeddings(url: str, dense: Tensor):
    cosines = (dense[1:] @ dense[0]).tolist()
    order = sorted(range(len(cosines)), key=cosines.__getitem__, reverse=True)

    scored = post(f"{url}/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})["data"]
    assert close([each["score"] for each in scored], cosines)
    for path in ("/rerank", "/v2/rerank"):
        ranked = post(f"{url}{path}", {"query": TEXTS[0], "documents": TEXTS[1:]})["results"]
        assert [each["index"] for each in ranked] == order
        assert close([each["relevance_score"] for each in ranked], [cosines[each] for each in order])
    ranked = post(f"{url}/rerank", {"query": TEXTS[0], "texts": TEXTS[1:]})
    assert [each["index"] for each in ranked] == order
    compared = post(f"{url}/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    assert close(compared, cosines)
