"""A model named by an id is fetched once, and only its needed files; errors name the remedy."""

from __future__ import annotations

import errno
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest

from infd.adapters.files import TENSORS, locate
from infd.config import HubAccess
from infd.errors import CheckpointError, ConfigError, FetchFailed, StartError
from infd.hub.fetch import LAYERS, TEXTS, fetch, is_id, split
from infd.hub.huggingface import HuggingFace
from infd.hub.modelscope import ModelScope
from tests.hub.stand_in import COMMIT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hub.stand_in import StandIn


@pytest.fixture
def get(hub: StandIn, tmp_path: Path) -> Any:
    """Fetch into a cache of the test's own."""

    def get(name: str = "org/tiny", revision: str | None = None, **access: Any) -> Path:
        access = {"endpoint": hub.url, "cache": tmp_path / "cache", **access}
        return fetch(name, HuggingFace(split(name)[0], revision, HubAccess(**access)), lambda done, total: None)

    return get


def refusal(get: Any, kind: type[StartError], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as refused:
        get(*args, **options)
    return str(refused.value)


def test_only_safetensors_and_their_small_files_are_fetched(hub: StandIn, get: Any):
    directory = get()

    assert hub.fetched() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert (directory / "model.safetensors").read_bytes() == hub.files["org/tiny"]["model.safetensors"]


def test_only_the_models_files_are_requested_from_the_hub(hub: StandIn, get: Any):
    get()

    assert all("org/tiny" in path for _, path in hub.asked), "no telemetry, and no question about anything else"


def test_the_index_names_the_weights(hub: StandIn, get: Any):
    model = dict(hub.files["org/tiny"])
    shards = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    model["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.files["org/sharded"] = model | {shard: shard.encode() for shard in shards}

    directory = get("org/sharded")

    assert {*shards} <= hub.fetched()
    assert "model.safetensors" not in hub.fetched(), "the same weights twice"
    assert all((directory / shard).exists() for shard in shards)


def test_a_model_that_is_pooled_comes_with_its_modules(hub: StandIn, get: Any):
    needed = (
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"),
        *("2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/pytorch_model.bin"),
        *("sparse_linear.pt", "colbert_linear.pt"),
    )
    others = ("pytorch_model.bin", "onnx/model.onnx", "training_args.bin", "openvino/config.json", "code.py")
    hub.files["org/pooled"] = hub.files["org/tiny"] | {name: name.encode() for name in (*needed, *others)}

    directory = get("org/pooled")

    assert {*needed} <= hub.fetched()
    assert not hub.fetched() & {*others}
    assert (directory / "2_Dense/config.json").read_bytes() == b"2_Dense/config.json"


ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"factors", "tokenizer.json": b"vocabulary"}


@pytest.mark.parametrize("base", [{}, {"config.json": b"sizes", "model.safetensors": b"weights"}])
def test_an_adapter_is_fetched_where_it_is_no_model_itself(hub: StandIn, tmp_path: Path, base: dict[str, bytes]):
    hub.files["org/adapter"] = {**ADAPTER, **base, "adapter_model.bin": b"pickle", "optimizer.pt": b"pickle"}
    access = HubAccess(endpoint=hub.url, cache=tmp_path / "cache")

    directory = fetch("org/adapter", HuggingFace("org/adapter", None, access), lambda done, total: None, adapters=True)

    assert hub.fetched() == {"adapter_config.json", "tokenizer.json", *(base or [TENSORS])}
    if not base:
        found = locate(str(directory), str(tmp_path / "cache"))
        assert (found.config.read_bytes(), found.tensors.read_bytes()) == (b"{}", b"factors")


def test_an_adapter_without_safetensors_and_one_that_is_started_are_refused(hub: StandIn, get: Any, tmp_path: Path):
    hub.files["org/pickled"] = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    hub.files["org/adapter"] = ADAPTER
    access = HubAccess(endpoint=hub.url, cache=tmp_path / "cache")

    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors: load the adapter with PEFT"):
        fetch("org/pickled", HuggingFace("org/pickled", None, access), lambda done, total: None, adapters=True)
    assert "`infd pull org/adapter` fetches it" in refusal(get, CheckpointError, "org/adapter")


def test_an_index_cannot_name_files_outside_the_model(hub: StandIn, get: Any):
    index = {"weight_map": {"a": "../../x.safetensors"}}
    hub.files["org/evil"] = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}

    assert "expected the name of a file" in refusal(get, CheckpointError, "org/evil")


def test_cached_files_are_not_fetched_again_and_work_offline(hub: StandIn, get: Any):
    first = get()
    hub.asked.clear()

    assert get() == first
    assert hub.fetched() == set()
    hub.asked.clear()
    assert get(offline=True) == first
    assert hub.asked == []
    hub.broken = True
    assert get() == first, "a hub that is down is no reason not to start"


def test_bytes_are_counted_while_they_come(hub: StandIn, tmp_path: Path):
    told: list[tuple[int, int]] = []
    access = HubAccess(endpoint=hub.url, cache=tmp_path)

    fetch("org/tiny", HuggingFace("org/tiny", None, access), lambda done, total: told.append((done, total)))

    size = len(hub.files["org/tiny"]["model.safetensors"])
    assert told[-1] == (size, size)


def test_a_revision_can_be_named(get: Any):
    assert get(revision=COMMIT).name == COMMIT
    assert refusal(get, CheckpointError, revision="v9").startswith("org/tiny has no revision 'v9'")


def test_a_token_is_sent(hub: StandIn, get: Any):
    hub.tokens = {"hf_secret"}

    assert "give a token in HF_TOKEN" in refusal(get, CheckpointError, token="hf_wrong")
    assert get(token="hf_secret").is_dir()


def test_a_gated_models_error_names_the_page_of_its_terms(hub: StandIn, get: Any):
    hub.gated = {"org/tiny"}

    said = refusal(get, CheckpointError)

    assert f"Accept the model's terms at {hub.url}/org/tiny" in said
    assert "HF_TOKEN" in said


def test_an_unknown_name_is_reported_as_neither_directory_nor_model(get: Any):
    assert refusal(get, CheckpointError, "org/none").startswith("org/none is neither a directory here nor a model at")


def test_offline_and_not_here_names_the_variable(get: Any):
    said = refusal(get, CheckpointError, offline=True)

    assert "HF_HUB_OFFLINE forbids fetching it" in said


def test_offline_with_the_weights_missing_names_the_variable_too(hub: StandIn, get: Any, tmp_path: Path):
    HuggingFace("org/tiny", None, HubAccess(endpoint=hub.url, cache=tmp_path / "cache")).snapshot(TEXTS)

    assert "not complete" in refusal(get, CheckpointError, offline=True)


def test_a_model_without_safetensors_is_refused_with_its_files(hub: StandIn, get: Any):
    hub.files["org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}

    said = refusal(get, CheckpointError, "org/old")

    assert "org/old has no model.safetensors; infd reads safetensors under the names" in said
    assert "It has pytorch_model.bin" in said
    assert "pytorch_model.bin" not in hub.fetched()


GGUF = {f"Tiny-{tag}.gguf": tag.encode() for tag in ("Q4_K_M", "IQ4_XS", "q8_0")}
PARTS = {f"BF16/Tiny-BF16-{number:05}-of-00002.gguf": bytes([number]) for number in (1, 2)}


def test_the_gguf_file_of_a_tag_is_fetched_alone(hub: StandIn, get: Any):
    hub.files["org/gguf"] = {"config.json": b"{}", **GGUF, **PARTS}

    file = get("org/gguf:Q4_K_M")

    assert (file.name, file.read_bytes()) == ("Tiny-Q4_K_M.gguf", b"Q4_K_M")
    assert hub.fetched() == {"Tiny-Q4_K_M.gguf"}
    assert get("org/gguf:Q4_K_M", offline=True) == file
    assert get("org/gguf:Q8_0").name == "Tiny-q8_0.gguf", "whether its letters are large or small"


def test_all_parts_of_a_gguf_file_are_fetched_and_the_first_is_returned(hub: StandIn, get: Any):
    hub.files["org/gguf"] = {**GGUF, **PARTS}

    file = get("org/gguf:BF16")

    assert file.name == "Tiny-BF16-00001-of-00002.gguf"
    assert hub.fetched() == set(PARTS)
    assert all((file.parent / name.partition("/")[2]).exists() for name in PARTS)


def test_a_tag_that_no_file_or_several_files_have_is_refused_with_the_files(hub: StandIn, get: Any):
    hub.files["org/gguf"] = {**GGUF, "other-IQ4_XS.gguf": b"IQ4_XS", **PARTS}

    said = refusal(get, CheckpointError, "org/gguf:Q5_K_M")
    assert "no GGUF file's name ends in this tag. It has BF16/Tiny-BF16-00001-of-00002.gguf, Tiny-IQ4_XS.gguf" in said
    assert hub.fetched() == set()
    said = refusal(get, CheckpointError, "org/gguf:IQ4_XS")
    assert "several files match 'IQ4_XS': name one with --model: Tiny-IQ4_XS.gguf, other-IQ4_XS.gguf" in said
    said = refusal(get, CheckpointError, "org/gguf:4_K_M")
    assert "no GGUF file's name ends in this tag" in said, "the tag must follow a separator"


def test_a_model_with_gguf_files_only_is_refused_with_a_name_to_give(hub: StandIn, get: Any):
    hub.files["org/gguf"] = GGUF

    assert "Name one of its GGUF files by the end of its name: org/gguf:IQ4_XS" in refusal(
        get, CheckpointError, "org/gguf"
    )


@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:9"], ids=["broken", "not there"])
def test_an_unreachable_hub_may_be_tried_again(hub: StandIn, get: Any, endpoint: str | None):
    hub.broken = True

    said = refusal(get, FetchFailed, endpoint=endpoint or hub.url)

    assert "cannot be reached" in said
    assert "Check the network" in said
    assert FetchFailed.exit_code == 74, "not one that keeps systemd from trying again"


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [(errno.ENOSPC, FetchFailed, "no space left"), (errno.EACCES, CheckpointError, "not writable; set HF_HOME")],
)
def test_a_full_disk_is_named(
    get: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StartError], said: str
):
    def refuse(*args: Any, **options: Any) -> str:
        raise RuntimeError("cannot write") from OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)

    message = refusal(get, kind)

    assert said in message
    assert str(tmp_path / "cache") in message


@pytest.mark.parametrize("name", ["org/name", "Org-1/na.me_2-b", "a/b", "org/name:Q4_K_M"])
def test_ids_have_two_parts(name: str):
    assert is_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "name",
        "./name",
        "../name",
        "/org/name",
        "org/name/",
        "a/b/c",
        "~/name",
        "org/",
        "",
        "o rg/n",
        "org/..",
        "é/b",
        "org/name:",
        "org/name:a/b",
        "name:a",
    ],
)
def test_other_names_are_not_ids(name: str):
    assert not is_id(name)


def test_modelscope_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)

    with pytest.raises(ConfigError, match="pip install modelscope"):
        ModelScope("org/tiny", None)


class Library(ModuleType):
    """The function of ModelScope's package that infd uses."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        super().__init__("modelscope")
        self.directory, self.error = directory, error
        self.asked: list[SimpleNamespace] = []

    def snapshot_download(self, model_id: str, **options: Any) -> str:
        self.asked.append(SimpleNamespace(model_id=model_id, **options))
        if self.error is not None:
            raise self.error
        for pattern in options["allow_patterns"]:
            if "*" not in pattern and not pattern.endswith("index.json"):
                (self.directory / pattern).parent.mkdir(exist_ok=True)
                (self.directory / pattern).write_bytes(b"12345")
        for kind in options["progress_callbacks"]:
            counting = kind("model.safetensors", 5)
            counting.update(5)
            counting.end()
        return str(self.directory)


def test_modelscope_fetches_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = Library(tmp_path)
    monkeypatch.setitem(sys.modules, "modelscope", library)
    told: list[tuple[int, int]] = []

    directory = fetch("org/tiny", ModelScope("org/tiny", "v1"), lambda *at: told.append(at))

    assert directory == tmp_path
    assert [(asked.model_id, asked.revision) for asked in library.asked] == [("org/tiny", "v1")] * 2
    assert [asked.allow_patterns for asked in library.asked] == [list(TEXTS), ["model.safetensors", *LAYERS]]
    assert told == [(5, 5)]


@pytest.mark.parametrize(
    ("error", "kind"), [(ConnectionError("no route"), FetchFailed), (ValueError("no such model"), CheckpointError)]
)
def test_errors_of_modelscope_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[StartError]
):
    monkeypatch.setitem(sys.modules, "modelscope", Library(tmp_path, error))

    with pytest.raises(kind, match=str(error)):
        fetch("org/tiny", ModelScope("org/tiny", None), lambda *at: None)
