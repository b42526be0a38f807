"""What `read` finds in directories that sentence-transformers wrote; `record.py` records what that library reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infd.errors import CheckpointError
from infd.pooling import PoolingSettings, read

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())["cases"]
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def write(directory: Path, files: dict[str, Any]) -> dict[str, Any]:
    """Write files into `directory`; return the content of config.json."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return json.loads((directory / "config.json").read_text())


def recorded(directory: Path, case: str, **changed: Any) -> PoolingSettings:
    """Read a recorded case with some files replaced; dots in names of files are written as they are."""
    return read(directory, write(directory, RECORDED[case]["files"] | changed))


def test_an_embedder_is_read_as_sentence_transformers_reads_it(tmp_path: Path):
    embedders = {name: case["read"] for name, case in RECORDED.items() if "pooling" in case["read"]}
    assert len(embedders) == 10
    for name, expected in embedders.items():
        found = recorded(tmp_path / name, name)
        denses = [[each.inputs, each.outputs, each.bias, each.activation] for each in found.denses]
        shown = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in ((key, getattr(found, key)) for key in expected if key != "denses")
        }
        assert shown | {"denses": denses} == expected | {
            "denses": [[*sizes, ACTIVATIONS[activation]] for *sizes, activation in expected["denses"]]
        }, name
        assert found.tasks == ("embed", "token_embed")
        assert found.lower_case == (name == "older")


def test_a_cross_encoder_has_the_labels_and_the_activation_that_sentence_transformers_gives_it(tmp_path: Path):
    scorers = {name: case["read"] for name, case in RECORDED.items() if "labels" in case["read"]}
    assert len(scorers) == 3
    for name, expected in scorers.items():
        found = recorded(tmp_path / name, name)
        assert found.tasks == ("classify",)
        assert (len(found.labels), found.activation) == (expected["labels"], ACTIVATIONS[expected["activation"]])
        assert found.pairs == (expected["labels"] == 1)


def test_a_model_that_generates_is_pooled_only_where_its_directory_or_the_caller_says_so(tmp_path: Path):
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8}

    assert read(tmp_path, config) == PoolingSettings()
    assert read(tmp_path, config, task="embed").pooling == "lasttoken"
    assert read(tmp_path, config, task="classify").tasks == ("classify",)
    write(tmp_path, RECORDED["cls"]["files"])
    assert read(tmp_path, config).pooling == "cls"
    assert read(tmp_path, config, task="none") == PoolingSettings()


def test_labels_come_from_the_configuration(tmp_path: Path):
    def of(architecture: str, **config: Any) -> PoolingSettings:
        return read(tmp_path, {"architectures": [architecture], "hidden_size": 8, **config})

    found = of("BertForSequenceClassification", model_type="bert", id2label={"1": "good", "0": "bad"})
    assert (found.labels, found.activation, found.pooling) == (("bad", "good"), "softmax", "cls")
    assert of("LlamaForSequenceClassification", model_type="llama").pooling == "lasttoken"
    logits = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert of("BertForSequenceClassification", model_type="bert", sentence_transformers=logits).activation == "none"
    many = of("BertForSequenceClassification", model_type="bert", problem_type="multi_label_classification")
    assert many.activation == "sigmoid"
    assert (
        of("ModernBertForSequenceClassification", model_type="modernbert", classifier_pooling="mean").pooling == "mean"
    )
    named = of("BertForTokenClassification", model_type="bert", id2label={"0": "O", "1": "B"})
    assert (named.tasks, named.labels, named.pairs) == (("token_classify",), ("O", "B"), False)


def test_the_dimensions_for_which_a_model_was_trained_come_from_the_configuration(tmp_path: Path):
    stated = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8}
    nested = {**stated, "matryoshka_dimensions": [2, 4]}
    assert read(tmp_path, stated).matryoshka == ()
    assert read(tmp_path, nested).matryoshka == (2, 4)
    write(tmp_path, RECORDED["mean"]["files"])
    assert read(tmp_path, nested).matryoshka == (2, 4)
    with pytest.raises(CheckpointError, match=r"matryoshka_dimensions: expected positive integers, found \[4, 0\]"):
        read(tmp_path, {**stated, "matryoshka_dimensions": [4, 0]})


def test_texts_are_as_long_as_the_tokenizer_and_the_positions_permit(tmp_path: Path):
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8, "max_position_embeddings": 512}
    assert read(tmp_path, config).max_tokens == 512
    for most, expected in ((128, 128), (2048, 512), (1e30, 512)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": most}))
        assert read(tmp_path, config).max_tokens == expected
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read(tmp_path, config).max_tokens == 256


REFUSED = {
    "a module": ({"modules.json": [{"name": "0", "path": "", "type": "x.Transformer"},
                                   {"name": "1", "path": "1_C", "type": "sentence_transformers.models.CNN"}]}, "CNN"),
    "no transformer": ({"modules.json": [{"name": "0", "path": "", "type": "a.StaticEmbedding"}]}, "StaticEmbedding"),
    "a folder for weights": ({"modules.json": [{"name": "0", "path": "0_BERT", "type": "a.Transformer"}]}, "0_BERT"),
    "a way out": ({"modules.json": [{"name": "0", "path": "", "type": "a.Transformer"},
                                    {"name": "1", "path": "../x", "type": "a.Pooling"}]}, "not a folder"),
    "no pooling": ({"modules.json": [{"name": "0", "path": "", "type": "a.Transformer"}]}, "Pooling"),
    "two modes": ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, "cls, mean"),
    "another mode": ({"1_Pooling/config.json": {"pooling_mode": "middle"}}, "middle"),
    "another width": ({"1_Pooling/config.json": {"embedding_dimension": 9}}, "9 elements"),
    "not JSON": ({"1_Pooling/config.json": "{"}, "1_Pooling"),
    "an activation": ({"2_Dense/config.json": {"in_features": 8, "out_features": 6,
                                               "activation_function": "os.system"}}, "system"),
    "a dense layer's inputs": ({"2_Dense/config.json": {"in_features": 7, "out_features": 6}}, "7 inputs"),
    "tokens' dense layer": ({"2_Dense/config.json": {"in_features": 8, "out_features": 6,
                                                     "module_input_name": "token_embeddings"}}, "token_embeddings"),
    "a residual": ({"2_Dense/config.json": {"in_features": 8, "out_features": 6,
                                            "use_residual": True}}, "use_residual"),
    "no such prompt": ({"config_sentence_transformers.json": {"default_prompt_name": "x"}}, "default_prompt_name 'x'"),
    "a similarity": ({"config_sentence_transformers.json": {"similarity_fn_name": "maxsim"}}, "maxsim"),
    "no tokens": ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length"),
}  # fmt: skip


def test_settings_that_are_not_computed_are_refused_by_name(tmp_path: Path):
    for index, (files, named) in enumerate(REFUSED.values()):
        with pytest.raises(CheckpointError, match=named):
            recorded(tmp_path / str(index), "denses", **files)


def test_a_missing_file_of_a_module_is_named(tmp_path: Path):
    config = write(tmp_path, RECORDED["mean"]["files"])
    (tmp_path / "1_Pooling/config.json").unlink()

    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: No such file"):
        read(tmp_path, config)
