"""Every encoder against transformers, in float32: hidden states of texts packed with others, and labels."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.reference import dense
from infd.kernels.select import select
from infd.models import registry
from infd.models.config import context_length
from infd.pooling import read
from tests.kernels.paging import CPU
from tests.kernels.values import draw
from tests.models.encoding import ENCODERS, VOCAB, encode, load_encoder, make, oracle, text

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CLOSE = 2e-5
LENGTHS = (1, 41, 7, 70, 2)
# Variants whose heads are no other variant's.
LABELLED = sorted(set(ENCODERS) - {"bert-relu", "camembert", "xlm-roberta", "electra-wide"})
CLASSIFIES, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return cache(
        lambda variant, head="AutoModel", **changed: make(variant, tmp_path_factory.mktemp(variant), head, **changed)
    )


def off(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors of equal shapes."""
    assert ours.shape == theirs.shape
    difference = (ours.float() - theirs).abs().max().item()
    return difference if difference == difference else float("inf")  # noqa: PLR0124 -- NaN counts as infinite


def pooled(directory: Path) -> str:
    return read(directory, json.loads((directory / "config.json").read_text())).pooling


def types_of(tokens: list[int], second: int | None) -> Tensor:
    return torch.tensor([[int(second is not None and at >= second) for at in range(len(tokens))]])


@pytest.mark.parametrize("variant", sorted(ENCODERS))
def test_a_text_packed_with_others_has_the_hidden_states_it_has_alone(variant, checkpoint):
    theirs, ours = oracle(checkpoint(variant)), load_encoder(checkpoint(variant))
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    assert not ours.generates
    assert not ours.cache_layout(16).groups
    for tokens, hidden in zip(texts, encode(ours, texts), strict=True):
        with torch.inference_mode():
            assert off(hidden, theirs(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


@pytest.mark.parametrize("variant", ["bert", "gte", "nomic-bert", "electra"])
def test_the_second_text_of_a_pair_has_its_own_type(variant, checkpoint):
    theirs, ours = oracle(checkpoint(variant)), load_encoder(checkpoint(variant))
    texts, seconds = [text(1, 20), text(2, 9), text(3, 30)], [8, None, 29]

    for tokens, second, hidden in zip(texts, seconds, encode(ours, texts, seconds), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), token_type_ids=types_of(tokens, second)).last_hidden_state[0]
        assert off(hidden, expected) < CLOSE


def test_where_there_is_one_type_both_texts_of_a_pair_have_it(checkpoint):
    ours = load_encoder(checkpoint("roberta"))

    assert encode(ours, [text(1, 20)], [8])[0].equal(encode(ours, [text(1, 20)])[0])


@pytest.mark.parametrize("variant", LABELLED)
def test_a_text_has_the_labels_that_transformers_gives_it(variant, checkpoint):
    directory = checkpoint(variant, CLASSIFIES, num_labels=3)
    theirs, ours = oracle(directory, CLASSIFIES), load_encoder(directory)
    tokens = text(5, 23)

    hidden = encode(ours, [text(4, 3), tokens])[1]
    with torch.inference_mode():
        vector = hidden.mean(0) if pooled(directory) == "mean" else hidden[0]
        assert off(ours.pooling_head("classify")(vector[None]), theirs(torch.tensor([tokens])).logits) < CLOSE
    assert ours.pooling_head("embed") is None


@pytest.mark.parametrize("variant", LABELLED)
def test_a_checkpoint_with_a_head_for_labels_embeds_without_it(variant, checkpoint):
    directory = checkpoint(variant, CLASSIFIES, num_labels=3)
    theirs, ours = oracle(directory), load_encoder(directory, task="embed")

    with torch.inference_mode():
        expected = theirs(torch.tensor([text(5, 23)])).last_hidden_state[0]
    assert off(encode(ours, [text(5, 23)])[0], expected) < CLOSE
    assert ours.pooling_head("embed") is None


@pytest.mark.parametrize("variant", LABELLED)
def test_each_token_has_the_labels_that_transformers_gives_it(variant, checkpoint):
    directory = checkpoint(variant, TOKENS, num_labels=5)
    theirs, ours = oracle(directory, TOKENS), load_encoder(directory)
    tokens = text(6, 23)

    hidden = encode(ours, [text(4, 3), tokens])[1]
    with torch.inference_mode():
        assert off(ours.pooling_head("token_classify")(hidden), theirs(torch.tensor([tokens])).logits[0]) < CLOSE


@pytest.mark.parametrize("variant", LABELLED)
def test_a_checkpoint_with_a_head_for_masked_tokens_is_read_without_it(variant, checkpoint):
    directory = checkpoint(variant, "AutoModelForMaskedLM")
    tokens = text(7, 12)

    (hidden,) = encode(load_encoder(directory), [tokens])
    masked = oracle(directory, "AutoModelForMaskedLM")
    with torch.inference_mode():
        assert off(hidden, masked.base_model(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


def test_distances_beyond_the_last_bucket_share_its_bias(checkpoint):
    theirs, ours = oracle(checkpoint("mpnet")), load_encoder(checkpoint("mpnet"))
    tokens = text(8, 270)

    with torch.inference_mode():
        assert off(encode(ours, [tokens])[0], theirs(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


def rewritten(directory: Path, into: Path, config: dict[str, Any], root: str) -> Path:
    """Save a checkpoint with another config.json, its tensors' names preceded by `root`."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    save_file({f"{root}{name}": tensor for name, tensor in tensors.items()}, into / "model.safetensors")
    (into / "config.json").write_text(json.dumps(config))
    return into


def test_the_authors_own_files_of_gte_are_read(checkpoint, tmp_path):
    config = json.loads((checkpoint("gte") / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    own = {**config, "architectures": ["NewModel"], "model_type": "new", "rope_theta": theta, "pack_qkv": True}
    model = load_encoder(rewritten(checkpoint("gte"), tmp_path, own, "new."))

    assert off(encode(model, [text(1, 20)])[0], encode(load_encoder(checkpoint("gte")), [text(1, 20)])[0]) == 0
    del own["rope_theta"]  # the default is that of the checkpoint
    assert theta == 160_000
    model = load_encoder(rewritten(checkpoint("gte"), tmp_path, own, "new."))
    assert off(encode(model, [text(1, 20)])[0], encode(load_encoder(checkpoint("gte")), [text(1, 20)])[0]) == 0


def test_the_authors_own_files_of_nomic_bert_are_read(checkpoint, tmp_path):
    own = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": 48,
        "n_head": 4,
        "n_layer": 3,
        "n_inner": 80,
        "n_positions": 128,
        "vocab_size": VOCAB,
        "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "prenorm": False,
    }
    model = load_encoder(rewritten(checkpoint("nomic-bert"), tmp_path, own, ""))

    assert off(encode(model, [text(1, 20)])[0], encode(load_encoder(checkpoint("nomic-bert")), [text(1, 20)])[0]) == 0


def test_positions_that_precede_a_text_shorten_the_longest_text():
    def longest(architecture: str, **config: int) -> int:
        return context_length({"architectures": [architecture], "max_position_embeddings": 514, **config})

    assert longest("BertModel") == 514
    assert longest("RobertaForSequenceClassification", pad_token_id=1) == 512
    assert longest("XLMRobertaModel", pad_token_id=3) == 510
    assert longest("Data2VecTextModel", pad_token_id=1) == 512
    assert longest("MPNetModel", pad_token_id=7) == 512


def test_what_a_family_does_not_compute_is_refused_by_name(checkpoint):
    from infd.weights.checkpoint import Checkpoint

    with Checkpoint(checkpoint("bert")) as opened:
        config = opened.config
    for key, value in {"position_embedding_type": "relative_key", "is_decoder": True, "hidden_act": "tanh"}.items():
        with pytest.raises(CheckpointError, match=key):
            registry.build({**config, key: value}, None, dtype=torch.float32, device="meta", max_len=8)
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        registry.check_dimensions({**config, "num_attention_heads": 5})


def test_dense_layers_follow_an_embedding(tmp_path):
    from safetensors.torch import save_file

    make("bert", tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense"}
    modules = [{"name": path, "path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    sizes = {"2_Dense": (48, 7, "torch.nn.Tanh"), "3_Dense": (7, 5, "torch.nn.Identity")}
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    stored = {}
    for folder, (inputs, outputs, activation) in sizes.items():
        (tmp_path / folder).mkdir()
        content = {"in_features": inputs, "out_features": outputs, "activation_function": activation}
        (tmp_path / folder / "config.json").write_text(json.dumps(content))
        stored[folder] = {"linear.weight": draw(outputs, inputs, seed=1), "linear.bias": draw(outputs, seed=2)}
        save_file(stored[folder], tmp_path / folder / "model.safetensors")

    vectors = draw(3, 48)
    expected = vectors
    for folder, (*_, activation) in sizes.items():
        expected = expected @ stored[folder]["linear.weight"].T + stored[folder]["linear.bias"]
        expected = expected.tanh() if activation.endswith("Tanh") else expected
    assert off(load_encoder(tmp_path).pooling_head("embed")(vectors), expected) < 1e-5
    assert load_encoder(tmp_path).pooling_head("token_embed") is None


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Return the least cosine of two tensors' rows."""
    return torch.cosine_similarity(ours.float(), theirs.float(), -1).min().item()


@pytest.mark.parametrize("variant", sorted(set(ENCODERS) - {"camembert", "electra-wide"}))
def test_all_layers_in_one_call_equal_the_layers(built, variant, checkpoint):
    """In bfloat16, whose products native code addresses; each is near what transformers computes in float32."""
    ops = select(CPU, torch.bfloat16)
    stacked = load_encoder(checkpoint(variant), ops=ops, dtype=torch.bfloat16)
    layered = load_encoder(checkpoint(variant), ops=ops.replace(encoder=dense.Stack()), dtype=torch.bfloat16)
    theirs = oracle(checkpoint(variant))
    assert stacked.stacked is not None
    assert layered.stacked is None
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    for tokens, one, other in zip(texts, encode(stacked, texts), encode(layered, texts), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).last_hidden_state[0]
        assert cosine(one, expected) > 0.998
        assert cosine(one, other) > 0.999


@pytest.mark.parametrize("variant", sorted(set(ENCODERS) - {"camembert", "electra-wide"}))
def test_bits_do_not_depend_on_how_threads_share_the_layers(built, variant, checkpoint):
    model = load_encoder(checkpoint(variant), ops=select(CPU, torch.bfloat16), dtype=torch.bfloat16)
    texts, before = [text(1, 20), text(2, 20)], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [encode(model, [each])[0] for each in texts]
        torch.set_num_threads(2)
        assert all(map(torch.equal, encode(model, texts), alone))
        assert all(encode(model, [each])[0].equal(one) for each, one in zip(texts, alone, strict=True))
        torch.set_num_threads(3)
        assert all(map(torch.equal, encode(model, texts), alone))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", sorted(set(ENCODERS) - {"camembert", "electra-wide"}))
def test_all_layers_in_one_call_equal_transformers_in_float32(built, variant, checkpoint):
    ops = select(CPU, torch.float32)
    theirs, ours = oracle(checkpoint(variant)), load_encoder(checkpoint(variant), ops=ops)
    assert ours.stacked is not None
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    for tokens, hidden in zip(texts, encode(ours, texts), strict=True):
        with torch.inference_mode():
            assert off(hidden, theirs(torch.tensor([tokens])).last_hidden_state[0]) < CLOSE


# Variants of which q is a product of its own if few tokens are read, because q ends where a panel of weights ends.
DIVIDED = {
    "bert": {"hidden_size": 64},
    "mpnet": {"hidden_size": 64},
    "modernbert": {"hidden_size": 128},
    "eurobert": {"hidden_size": 128},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "variant", [*sorted(set(ENCODERS) - {"camembert", "electra-wide"}), *map("divided {}".format, DIVIDED)]
)
def test_a_token_read_alone_has_the_bits_it_has_among_all(built, variant, dtype, checkpoint):
    name = variant.removeprefix("divided ")
    directory = checkpoint(name, **(DIVIDED[name] if name != variant else {}))
    ops = select(CPU, dtype)
    stacked = load_encoder(directory, ops=ops, dtype=dtype)
    layered = load_encoder(directory, ops=ops.replace(encoder=dense.Stack()), dtype=dtype)
    assert stacked.stacked is not None
    assert layered.stacked is None
    assert stacked.skips_unsampled
    texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]

    for model in (stacked, layered):
        every = encode(model, texts)
        for positions in ([0] * len(texts), [len(each) - 1 for each in texts], [len(each) // 2 for each in texts]):
            found = encode(model, texts, read=positions)
            assert all(map(torch.equal, found, [hidden[[at]] for hidden, at in zip(every, positions, strict=True)]))
            if model is stacked:  # torch's gelu may round a number differently beside other numbers
                (alone,) = encode(model, texts[1:2], read=positions[1:2])
                assert alone.equal(found[1])
