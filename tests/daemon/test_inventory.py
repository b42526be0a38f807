"""`infd models` lists the models on this machine, and whether infd can serve them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tokenizers import pre_tokenizers

from infd import embedded
from infd.config import HubAccess
from infd.daemon.inventory import FoundModel, as_json, as_table, found_models
from tests.gguf.writing import write
from tests.tiny import make
from tests.weights.encodings.fixtures import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import gguf

    Cache = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Put a modified copy of the embedded model into a hub's cache."""

    def cache(name: str, *, without: tuple[str, ...] = (), main: bool = True, **settings: object) -> Path:
        repository = tmp_path / f"models--{name.replace('/', '--')}"
        directory = repository / "snapshots" / "abc"
        shutil.copytree(embedded.path(), directory)
        for file in without:
            (directory / file).unlink()
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | settings))
        if main:
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("abc")
        return directory

    return cache


def found(tmp_path: Path) -> dict[str, FoundModel]:
    return {model.name: model for model in found_models(HubAccess(cache=tmp_path))}


def test_the_embedded_model_is_always_listed(tmp_path: Path):
    (model,) = found(tmp_path / "nothing").values()

    assert (model.name, model.architecture, model.code) == ("embedded", "Qwen3ForCausalLM", "infd")
    assert model.bytes == (embedded.path() / "model.safetensors").stat().st_size


def test_warnings_that_a_start_would_log_are_not_printed_beside_the_table(cache: Cache, tmp_path: Path):
    directory = cache("org/base", without=("chat_template.jinja",))
    assert "chat_template" not in (directory / "tokenizer_config.json").read_text()
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "infd", "models"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)

    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "embedded", "org/base"]
    assert not done.stderr


def test_each_gguf_file_of_a_cached_model_is_listed(tmp_path: Path):
    directory = tmp_path / "models--org--gguf" / "snapshots" / "abc"
    directory.mkdir(parents=True)
    whole = write(make("llama", tmp_path / "made", num_hidden_layers=1), directory / "Tiny-F32.gguf", vocabulary=words)
    (directory / "Tiny-Q4_0.gguf").write_bytes(whole.read_bytes()[:999])

    models = found(tmp_path)

    assert set(models) == {"embedded", "org/gguf:F32", "org/gguf:Q4_0"}
    assert (models["org/gguf:F32"].code, models["org/gguf:F32"].architecture) == ("infd", "LlamaForCausalLM")
    assert models["org/gguf:F32"].bytes == whole.stat().st_size
    assert "the header needs" in (models["org/gguf:Q4_0"].reason or "")


def words(writer: gguf.GGUFWriter) -> None:
    """Write a small vocabulary: the bytes' characters and one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])
    writer.add_token_merges(["a b"])


def test_cached_models_are_listed_with_the_reason_if_unsupported(cache: Cache, tmp_path: Path):
    directory = cache("org/good-one")
    cache("org/--odd--name", main=False)
    cache("org/quantized", quantization_config={"quant_method": "gptq"})
    cache("org/without-weights", without=("model.safetensors",))
    cache("org/without-words", without=("tokenizer.json",))
    cache("org/borrowed", architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox")
    cache("org/embeds", architectures=["BertModel"], model_type="bert")
    cache("org/translates", architectures=["T5ForConditionalGeneration"], model_type="t5")
    incomplete = cache("org/incomplete", without=("model.safetensors",))
    (incomplete / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (tmp_path / "models--org--empty").mkdir()
    (tmp_path / "datasets--org--data").mkdir()

    models = found(tmp_path)

    assert models["org/good-one"].code == "infd"
    assert models["org/good-one"].path == str(directory)
    assert models["org/--odd--name"].code == "infd"
    assert models["org/embeds"].code == "infd"
    assert models["org/borrowed"].code == "transformers"
    reasons = {name.removeprefix("org/"): model.reason for name, model in models.items() if model.code is None}
    assert set(reasons) == {"quantized", "without-weights", "without-words", "translates", "incomplete"}
    assert "quantization_config" in (reasons["quantized"] or "")
    assert reasons["without-weights"] == "model.safetensors: No such file"
    assert (reasons["without-words"] or "").startswith("tokenizer.json is missing, and so is any of tokenizer.model")
    assert reasons["incomplete"] == "model-1.safetensors: No such file or directory"
    assert "no decoder of this name" in (reasons["translates"] or "")
    assert models["org/quantized"].architecture == "Qwen3ForCausalLM"


def test_a_quantized_model_is_listed_with_its_encodings(cache: Cache, tmp_path: Path):
    directory = cache("org/gptq")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(WRITTEN / "gptq-desc-act" / file, directory)

    model = found(tmp_path)["org/gptq"]

    assert model.stored == {"int4, groups of 32, zero points, reordered": 6}
    assert as_table([model]).endswith("infd's code, stored as int4, groups of 32, zero points, reordered (6 matrices)")


def test_a_table_has_a_line_for_each_and_json_all_there_is():
    models = (
        FoundModel(name="embedded", path="/a", architecture="Qwen3ForCausalLM", bytes=13 * 2**20, code="infd"),
        FoundModel(name="org/x", path="/b", reason="there are no safetensors"),
    )

    assert as_table(models).splitlines() == [
        "NAME      ARCHITECTURE      SIZE    SERVED BY",
        "embedded  Qwen3ForCausalLM  13 MiB  infd's code",
        "org/x     -                 -       nobody: there are no safetensors",
    ]
    first = json.loads(as_json(models))[0]
    assert set(first) == {"name", "path", "architecture", "bytes", "code", "stored", "reason", "unchecked"}
