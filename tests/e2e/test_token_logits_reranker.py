"""Qwen3-Reranker's kind of model as a daemon: a pair's score is the probability of "yes" against "no" after the chat
template has enclosed the pair, from transformers' logits. The template is written out here a second time, in Python.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch

from tests.e2e.process import served
from tests.e2e.word_tokenizer import write_tokenizer
from tests.tiny import VOCAB, make, oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(120)]

SPECIAL = {"unk_token": "<unk>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
FIXED = "system user assistant judge the document by the query answer only yes or no find web search passages"
NAMED = ["<Instruct>:", "<Query>:", "<Document>:", "<think>", "</think>"]
FRAME = [*dict.fromkeys(FIXED.split()), *NAMED]
WORDS = [*FRAME, *(f"w{number}" for number in range(VOCAB - 3 - len(FRAME)))]
SYSTEM = "judge the document by the query answer only yes or no"
DEFAULT, OTHER = "find passages", "find web search"
TEMPLATE = (
    "<|im_start|> system " + SYSTEM + " <|im_end|> <|im_start|> user "
    "<Instruct>: {{ instruction | default('" + DEFAULT + "') }} "
    "{% for message in messages %}"
    "{% if message.role == 'query' %}<Query>: {{ message.content }} {% endif %}"
    "{% if message.role == 'document' %}<Document>: {{ message.content }} {% endif %}"
    "{% endfor %}<|im_end|>{% if add_generation_prompt %} <|im_start|> assistant <think> </think>{% endif %}"
)
QUERY = "w1 w2 w3"
DOCUMENTS = [" ".join(random.Random(seed).choices(WORDS[-99:], k=1 + seed * 7 % 60)) for seed in range(10)]


def prompt(document: str, instruction: str = DEFAULT) -> str:
    turns = [
        f"system {SYSTEM} <|im_end|>",
        f"user <Instruct>: {instruction} <Query>: {QUERY} <Document>: {document} <|im_end|>",
        "assistant <think> </think>",
    ]
    return " ".join(f"<|im_start|> {turn}" for turn in turns)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a decoder that generates, as its files say: only the settings make it a reranker."""
    directory = make("qwen3-tied", tmp_path_factory.mktemp("reranker"))
    write_tokenizer(directory, WORDS, SPECIAL, enclosed=False, most_tokens=512)
    (directory / "template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module", params=["settings", "config.json"])
def url(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"]
    arguments += ["--chat-template", str(checkpoint / "template.jinja")]
    config = checkpoint / "config.json"
    before = config.read_text()
    if request.param == "settings":
        arguments += ["--set", "pooling.label_tokens=no,yes"]
    else:
        config.write_text(json.dumps({**json.loads(before), "classifier_from_token": ["no", "yes"]}))
    try:
        with served(tmp_path_factory.mktemp("daemon"), arguments) as url:
            yield url
    finally:
        config.write_text(before)


def post(url: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = requests.post(url, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def ids(checkpoint: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def odds(checkpoint: Path, ids: Callable[[str], list[int]]) -> Callable[[Sequence[str]], list[float]]:
    """Return the function from prompts to transformers' logit of "yes" less that of "no"."""
    model, answers = oracle(checkpoint), ids("no yes")
    assert len(answers) == 2

    def function(prompts: Sequence[str]) -> list[float]:
        with torch.inference_mode():
            logits = [model(torch.tensor([ids(each)])).logits[0, -1, answers] for each in prompts]
        return [(yes - no).item() for no, yes in logits]

    return function


@pytest.fixture(scope="module")
def logits(odds: Callable[[Sequence[str]], list[float]]) -> list[float]:
    return odds([prompt(each) for each in DOCUMENTS])


@pytest.fixture(scope="module")
def scores(logits: list[float]) -> list[float]:
    """Return the probability of "yes" of each document."""
    found: list[float] = torch.tensor(logits).sigmoid().tolist()
    assert max(found) - min(found) > 0.5, "the answers hardly differ"
    return found


@pytest.fixture(scope="module")
def order(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=logits.__getitem__, reverse=True)


def test_scores_are_the_odds_of_yes(url: str, scores: list[float]):
    for fields in ({"text_1": QUERY, "text_2": DOCUMENTS}, {"queries": [QUERY], "items": DOCUMENTS}):
        found = post(f"{url}/score", fields)["data"]
        assert [each["score"] for each in found] == pytest.approx(scores, abs=2e-5)


def test_documents_are_ordered_by_the_odds_of_yes(url: str, logits: list[float], scores: list[float], order: list[int]):
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(f"{url}{path}", {"query": QUERY, "documents": DOCUMENTS, "top_n": 7})["results"]
        assert [each["index"] for each in ranked] == order[:7]
        expected = [scores[each] for each in order[:7]]
        assert [each["relevance_score"] for each in ranked] == pytest.approx(expected, abs=2e-5)
    ranked = post(f"{url}/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert [each["index"] for each in ranked] == order
    raw = post(f"{url}/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})
    assert {each["index"]: each["score"] for each in raw} == pytest.approx(dict(enumerate(logits)), abs=2e-4)


def test_an_instruction_reaches_the_template(
    url: str, odds: Callable[[Sequence[str]], list[float]], scores: list[float]
):
    body = {"query": QUERY, "documents": DOCUMENTS[:3], "instruction": OTHER}
    found = {each["index"]: each["relevance_score"] for each in post(f"{url}/rerank", body)["results"]}

    expected = torch.tensor(odds([prompt(each, OTHER) for each in DOCUMENTS[:3]])).sigmoid().tolist()
    assert found == pytest.approx(dict(enumerate(expected)), abs=2e-5)
    assert found != pytest.approx(dict(enumerate(scores[:3])), abs=1e-3)


def test_prompts_that_the_client_renders_have_equal_scores(
    url: str, ids: Callable[[str], list[int]], scores: list[float]
):
    given = [ids(prompt(each)) for each in DOCUMENTS]

    pooled = post(f"{url}/pooling", {"input": given, "task": "classify"})["data"]
    assert [each["data"] for each in pooled] == [pytest.approx([each], abs=2e-5) for each in scores]
    labelled = post(f"{url}/classify", {"input": given})["data"]
    assert [each["probs"] for each in labelled] == [pytest.approx([each], abs=2e-5) for each in scores]
    assert {each["label"] for each in labelled} == {"yes"}
    predicted = post(f"{url}/predict", {"inputs": [[prompt(each)] for each in DOCUMENTS]})
    assert [each[0]["score"] for each in predicted] == pytest.approx(scores, abs=2e-5)


def test_a_pair_without_its_template_is_refused(url: str):
    assert "/rerank or /score" in post(f"{url}/predict", {"inputs": ["w1", "w2"]}, status=400)["error"]
    refused = post(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}, status=400)
    assert "it serves: classify, score" in refused["error"]["message"]
