"""Encoders without a file in infd: transformers' code text by text, with the numbers that transformers gives."""

from __future__ import annotations

import json
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.errors import CheckpointError
from infd.models import registry
from infd.request import Pool
from tests.executors.pooling import Pooler, cosine, executor, reduced, states
from tests.models.encoding import VOCAB, encode, load_encoder, text
from tests.models.foreign import make as make_decoder

if TYPE_CHECKING:
    from pathlib import Path

CLOSE = 2e-5
LENGTHS = (1, 31, 7, 2)
CLASSIFIES, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
ENCODERS = MappingProxyType(
    {
        "albert": {"embedding_size": 32},  # all layers share their weights
        "deberta": _RELATIVE,
        "deberta-v2": {**_RELATIVE, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        "data2vec-text": {"max_position_embeddings": 130},  # positions begin behind the padding token's
        "fnet": {},  # no attention
    }
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def save(kind: str, head: str = "AutoModel", labels: int = 3) -> Path:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **ENCODERS[kind]}, num_labels=labels)
        model = getattr(transformers, head).from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(sum(kind.encode()))
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.dim() > 1:
                    tensor.normal_(0.0, 1.2 * tensor.shape[-1] ** -0.5, generator=generator)
        directory = tmp_path_factory.mktemp(kind)
        model.save_pretrained(directory)
        return directory

    return save


def oracle(directory: Path, head: str = "AutoModel") -> Any:
    import transformers

    return getattr(transformers, head).from_pretrained(directory, dtype=torch.float32).eval()


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


FEW = ("albert", "deberta-v2")
EVERY = [pytest.param(each, marks=() if each in FEW else pytest.mark.exhaustive) for each in ENCODERS]


@pytest.mark.parametrize("kind", EVERY)
def test_texts_of_a_step_have_the_hidden_states_that_they_have_alone(kind: str, saved):
    theirs, ours = oracle(saved(kind)), load_encoder(saved(kind))
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    assert not ours.generates
    assert (ours.cache_layout(16).groups, ours.cache_layout(16).divisible) == ((), False)
    for tokens, hidden in zip(texts, encode(ours, texts), strict=True):
        with torch.inference_mode():
            assert off(hidden, theirs(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


@pytest.mark.parametrize("kind", ["albert", pytest.param("deberta-v2", marks=pytest.mark.exhaustive)])
def test_labels_are_those_of_transformers_whichever_hidden_state_is_read(kind: str, saved):
    tokens = text(5, 23)
    for head in (CLASSIFIES, TOKENS):
        theirs, ours = oracle(saved(kind, head), head), load_encoder(saved(kind, head))
        rows = encode(ours, [text(4, 3), tokens])[1]
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits
        assert off(rows, expected[0] if head == TOKENS else expected.expand(len(tokens), -1)) < CLOSE
        assert ours.pooling_head("classify") is None


def test_a_checkpoint_with_a_head_for_masked_tokens_is_read_without_it(saved):
    directory = saved("albert", "AutoModelForMaskedLM")
    tokens = text(7, 12)
    with torch.inference_mode():
        expected = oracle(directory, "AutoModelForMaskedLM").albert(torch.tensor([tokens])).last_hidden_state[0]
    assert off(encode(load_encoder(directory), [tokens])[0], expected) < CLOSE


def test_the_second_text_of_a_pair_has_its_own_type(saved):
    theirs, ours = oracle(saved("albert")), load_encoder(saved("albert"))
    tokens, types = text(1, 20), torch.tensor([[0] * 8 + [1] * 12])
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), token_type_ids=types).last_hidden_state[0]
    assert off(encode(ours, [text(2, 3), tokens], [None, 8])[1], expected) < CLOSE


def test_a_decoder_without_causality_that_only_transformers_implements(tmp_path: Path):
    make_decoder("smollm3", tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "is_causal": False}))
    theirs, tokens = oracle(tmp_path), text(3, 25)
    (hidden,) = encode(load_encoder(tmp_path), [tokens])
    with torch.inference_mode():
        assert off(hidden, theirs(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


@pytest.mark.parametrize("head", ["AutoModel", CLASSIFIES])
async def test_decoders_on_transformers_code_pool_in_chunks(head: str, tmp_path: Path):
    import transformers

    make_decoder("phi", tmp_path / "whole")
    model = getattr(transformers, head).from_pretrained(tmp_path / "whole", num_labels=3, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    texts = [text(seed, length) for seed, length in enumerate((20, 3, 41))]
    runs = executor(tmp_path)
    try:
        capacity = await runs.load()
        assert not capacity.generates
        task = "embed" if head == "AutoModel" else "classify"
        numbers = await Pooler(runs, capacity)(*((each, Pool(task, activation=False)) for each in texts))
    finally:
        await runs.close()
    for tokens, found in zip(texts, numbers, strict=True):
        if head == "AutoModel":
            assert cosine(found[0], reduced(states(model, tokens), "mean")) > 0.99999
        else:
            with torch.inference_mode():
                assert off(torch.from_numpy(found.copy()), model(torch.tensor([tokens])).logits) < CLOSE


def test_encoders_that_use_random_numbers_are_refused():
    with pytest.raises(CheckpointError, match="random numbers"):
        registry.is_implemented({"architectures": ["ReformerModel"], "model_type": "reformer"})
