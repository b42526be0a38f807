"""SmolLM2-135M-Instruct in Q4_1, against transformers on the gguf package's dequantized weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from infd import LLM
from infd.apart.client import Worker
from infd.hub.packages import find
from infd.kernels.select import CANDIDATES, EXACT, select
from infd.text import apart
from infd.text.tokenizer import Tokenizer
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.base import Model

MODELS = Path(__file__).parents[2] / "build/test-data/infd/models"  # where `make test-data` puts it
TEXT = (Path(__file__).parent / "text.txt").read_text()
WINDOW = 200  # tokens that are scored together
CLEAR = 0.5  # between the reference's two largest logits: rounding to bfloat16 moves them less

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def file() -> Path:
    if (found := find("smollm2", MODELS)) is None:
        pytest.skip("make test-data")
    return found


@pytest.fixture(scope="module")
def model(file: Path) -> Model:
    return load_model(file, ops=select(CPU, torch.bfloat16), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens(file: Path) -> list[int]:
    with closing(Worker(apart.MODULE)) as worker:
        return list(Tokenizer.load(file, worker).encode(TEXT, add_special_tokens=False))


def start(model: Model) -> Driver:
    return Driver(model, ops=select(CPU, torch.bfloat16))


def test_the_tokenizer_of_the_file_is_transformers(file: Path, tokens: list[int]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokens == theirs(TEXT, add_special_tokens=False).input_ids
    assert len(tokens) > 500


class Comparison(NamedTuple):
    """Logits beside the reference's.

    perplexity  the reference's
    change      of the perplexity's logarithm; `error` is its standard error
    divergence  nats a token, Kullback-Leibler
    """

    perplexity: float
    change: float
    error: float
    divergence: float


def compare(file: Path, activations: str, reference: Any, tokens: list[int]) -> Comparison:
    ops = select(CPU, torch.bfloat16, {**CANDIDATES, **(EXACT if activations == "exact" else {})})
    model = load_model(file, ops=ops, dtype=torch.bfloat16)
    changes: list[Tensor] = []
    divergences: list[Tensor] = []
    losses: list[Tensor] = []  # the reference's
    with torch.inference_mode():
        for first in range(0, len(tokens), WINDOW):
            window = tokens[first : first + WINDOW]
            driver, said = Driver(model, ops=ops), torch.tensor(window[1:])
            logits = driver.step((driver.start(window), len(window)))[0]
            ours, theirs = logits.float().log_softmax(-1), reference(torch.tensor([window])).logits[0].log_softmax(-1)
            changes.append((theirs - ours)[:-1].gather(1, said[:, None]).flatten())
            divergences.append((theirs.exp() * (theirs - ours)).sum(1))
            losses.append(-theirs[:-1].gather(1, said[:, None]).flatten())
    change = torch.cat(changes)
    return Comparison(
        torch.cat(losses).mean().exp().item(),
        change.mean().item(),
        (change.std() / len(change) ** 0.5).item(),
        torch.cat(divergences).mean().item(),
    )


@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_perplexity_and_distributions_are_the_references(
    file: Path, activations: str, reference: Any, tokens: list[int]
) -> None:
    """On 603 tokens the standard error of int8's perplexity is 0.3 %; llama.cpp's divergence is 0.0031 nats a token."""
    found = compare(file, activations, reference, tokens)
    assert 5 < found.perplexity < 40
    assert abs(found.change) < 0.005 + (2 * found.error if activations == "int8" else 0)
    assert found.divergence < (0.0015 if activations == "exact" else 1.2 * 0.0031)


def test_perplexity_on_a_long_text_is_the_references(file: Path, reference: Any) -> None:
    """The manual of Python: the standard error of int8's perplexity is 0.09 %."""
    with closing(Worker(apart.MODULE)) as worker:
        manual = "\n".join(topics[name] for name in sorted(topics))
        tokens = list(Tokenizer.load(file, worker).encode(manual, add_special_tokens=False))[:12_000]
    found = compare(file, "int8", reference, tokens)
    assert found.error < 0.0012
    assert abs(found.change) < 0.005 + 2 * found.error


def test_a_pulled_model_is_served_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(MODELS.parents[1]))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    with LLM("smollm2", device="cpu", device__threads=1, max_model_len=256, exact_activations=True) as llm:
        (answer,) = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=12
        )
    assert "Paris" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("cut", [40, 120, 180])
def test_greedy_tokens_are_the_references_where_they_are_clear(
    model: Model, reference: Any, tokens: list[int], cut: int
) -> None:
    driver = start(model)
    sequence = driver.start(tokens[:cut])
    logits = driver.step((sequence, cut))[0]
    for _ in range(40):
        sequence.tokens.append(int(logits[-1].argmax()))
        logits = driver.step((sequence, 1))[0]
    with torch.inference_mode():
        told = reference(torch.tensor([sequence.tokens])).logits[0, cut - 1 : -1]
    best = told.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > CLEAR
    assert clear.sum() >= 15
    assert best.indices[clear, 0].tolist() == torch.tensor(sequence.tokens[cut:])[clear].tolist()
