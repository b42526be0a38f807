"""The settings [pooling] change what a checkpoint's files say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import PoolingConfig
from infd.errors import CheckpointError, ConfigError
from infd.pooling import PoolingSettings, configured

if TYPE_CHECKING:
    from pathlib import Path

DECODER = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocab = {"yes": 5, "no": 3, "other": 0}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"id": 9, "content": "<Yes>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


def settings(folder: Path, config: dict[str, Any] | None = None, **chosen: Any) -> PoolingSettings:
    return configured(PoolingConfig(**chosen), folder, config or DECODER)


def test_a_model_with_a_head_for_language_generates_unless_a_setting_says_otherwise(folder: Path):
    assert settings(folder).tasks == ()
    found = settings(folder, task="embed", mode="mean", normalize="yes")
    assert (found.tasks, found.pooling, found.normalize) == (("embed", "token_embed"), "mean", True)
    assert settings(folder, task="embed").pooling == "lasttoken"
    assert settings(folder, {**DECODER, "architectures": ["Qwen3Model"]}, task="generate").tasks == ()


@pytest.mark.parametrize(
    ("tokens", "labels", "ids", "activation"),
    [
        (("no", "yes"), ("yes",), (3, 5), "sigmoid"),
        (("<Yes>",), ("<Yes>",), (9,), "sigmoid"),
        (("no", "yes", "other"), ("no", "yes", "other"), (3, 5, 0), "softmax"),
    ],
)
def test_tokens_may_be_the_labels_of_a_model_that_generates(
    folder: Path, tokens: tuple[str, ...], labels: tuple[str, ...], ids: tuple[int, ...], activation: str
):
    found = settings(folder, label_tokens=tokens)
    assert found == settings(folder, {**DECODER, "classifier_from_token": list(tokens)})
    assert (found.tasks, found.pooling) == (("classify",), "lasttoken")
    assert (found.labels, found.label_tokens, found.activation) == (labels, ids, activation)
    assert found.pairs == (len(labels) == 1)
    assert settings(folder, label_tokens=tokens, activation="none").activation == "none"


def test_steps_of_an_answer_may_have_labels(folder: Path):
    config = {**DECODER, "architectures": ["Qwen3ForTokenClassification"], "num_labels": 2}
    found = settings(folder, config, step_token="<Yes>")
    assert (found.tasks, found.step_token, len(found.labels)) == (("token_classify",), 9, 2)

    found = settings(folder, label_tokens=("no", "yes"), step_token="<Yes>")
    assert (found.tasks, found.step_token, found.pairs) == (("token_classify",), 9, False)
    assert (found.label_tokens, found.labels, found.activation) == ((3, 5), ("yes",), "sigmoid")


def test_a_cross_encoder_of_logits_names_its_tokens(folder: Path):
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.LogitScore"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    where = folder / "1_LogitScore" / "config.json"
    where.write_text('{"true_token_id": 5, "false_token_id": 3}')
    found = settings(folder)
    assert (found.tasks, found.label_tokens, found.pairs, found.activation) == (("classify",), (3, 5), True, "sigmoid")

    where.write_text('{"true_token_id": 5, "false_token_id": null}')
    assert settings(folder).label_tokens == (5,)
    where.write_text('{"true_token_id": -5}')
    with pytest.raises(CheckpointError, match="1_LogitScore"):
        settings(folder)


def test_settings_that_do_not_suit_the_checkpoint_are_refused_by_name(folder: Path):
    with pytest.raises(CheckpointError, match="no tokens 'nein'"):
        settings(folder, label_tokens=("nein", "yes"))
    with pytest.raises(ConfigError, match=r"pooling\.label_tokens"):
        settings(folder, label_tokens=("no", "yes"), task="embed")
    with pytest.raises(CheckpointError, match=r"no tokens '<step>', which pooling\.step_token"):
        settings(folder, label_tokens=("no", "yes"), step_token="<step>")
    for task in ("generate", "embed"):
        with pytest.raises(ConfigError, match=r"pooling\.step_token"):
            settings(folder, task=task, step_token="<Yes>")
    with pytest.raises(ConfigError, match=r"pooling\.task"):
        settings(folder, normalize="yes")
