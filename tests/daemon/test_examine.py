"""`infd config check` and `infd models` report a checkpoint's faults as `infd start` does, without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infd import embedded
from infd.apart.client import Worker
from infd.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    Environment,
    GrammarConfig,
    HubAccess,
    LoraConfig,
    ModelConfig,
)
from infd.daemon import components
from infd.daemon.check import check
from infd.daemon.daemon import Daemon
from infd.daemon.examine import examine
from infd.errors import ConfigError, StartError
from infd.models.transformers import known
from infd.runner.pulse import Pulse
from infd.runner.start.loading import build
from infd.text import apart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[Path], None]

CPU = DeviceConfig(kind="cpu", threads=1)
GPT_NEOX = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return shutil.copytree(embedded.path(), tmp_path / "model")


def config(directory: Path, *, cache: dict[str, Any] | None = None, **model: Any) -> Config:
    settings = {"dtype": "float32", **model}
    return Config(model=ModelConfig(path=str(directory), **settings), device=CPU, cache=CacheConfig(**(cache or {})))


def describe(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def remove(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def shard(directory: Path) -> None:
    """Make the index name a missing file."""
    tensors = load_file(directory / "model.safetensors")
    remove(directory)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[1:]}, directory / "model-2.safetensors")
    files = {name: f"model-{2 if index else 1}.safetensors" for index, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def promise(directory: Path) -> None:
    """Make the index name a tensor that its file lacks."""
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    files = {"model.embed_tokens.weight": "model-1.safetensors", "model.more.weight": "model-1.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


STRANGE = {
    "MambaForCausalLM": ("mamba", "recurrent state"),
    "T5ForConditionalGeneration": ("t5", "no decoder of this name"),
    "BloomForCausalLM": ("bloom", "ALiBi"),
    "MptForCausalLM": ("mpt", "ALiBi"),
    "RwkvForCausalLM": ("rwkv", "recurrent state"),
    "Nonsense": ("qwen3", "no decoder of this name"),
}


@pytest.mark.parametrize("architecture", STRANGE)
def test_an_unsupported_architecture_is_refused_by_name(checkpoint: Path, architecture: str) -> None:
    """These configs lack max_position_embeddings, which is no fault."""
    kind, reason = STRANGE[architecture]
    table = {"architectures": [architecture], "model_type": kind, "vocab_size": 512, "num_hidden_layers": 2}
    (checkpoint / "config.json").write_text(json.dumps(table))

    (fault,) = examine(checkpoint, config(checkpoint)).faults

    assert fault.startswith(f"{checkpoint}: config.json: architecture '{architecture}' is not supported: ")
    assert reason in fault
    assert "; supported: " in fault
    assert ", Gemma2ForCausalLM, " in fault
    with pytest.raises(StartError) as refused:
        build(config(checkpoint), Pulse())
    assert str(refused.value) == fault


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (truncate, {}, "the header describes"),
        (lengthen, {}, "the header describes"),
        (remove, {}, "model.safetensors: No such file"),
        (shard, {}, "model-1.safetensors: No such file"),
        (promise, {}, "model.more.weight should be in model-1.safetensors, which does not hold it"),
        (describe(num_attention_heads=3), {}, "num_key_value_heads: expected a divisor"),
        (describe(max_position_embeddings=1), {}, "a prompt and an answer need 2"),
        (
            describe(quantization_config={"quant_method": "gptq"}),
            {},
            "quantization_config: Object missing required field `bits`",
        ),
        (describe(), {"max_model_len": 10**6}, "model.max_model_len is 1000000; the model's context length is"),
        (describe(), {"cache": {"dtype": "bfloat16"}}, "cache.dtype: no attention kernel supports 'bfloat16' on cpu"),
    ],
)
def test_the_checks_messages_are_those_of_start(
    checkpoint: Path, change: Change, settings: dict[str, Any], says: str
) -> None:
    change(checkpoint)

    (fault,) = examine(checkpoint, config(checkpoint, **settings)).faults

    assert says in fault
    with pytest.raises(StartError) as refused:
        build(config(checkpoint, **settings), Pulse())
    assert str(refused.value) == fault


@pytest.mark.parametrize(("file", "text"), [("tokenizer.json", None), ("tokenizer.json", "{}")])
def test_an_unreadable_tokenizer_is_refused_with_starts_message(checkpoint: Path, file: str, text: str | None) -> None:
    (checkpoint / file).unlink() if text is None else (checkpoint / file).write_text(text)

    (fault,) = examine(checkpoint, config(checkpoint)).faults

    with closing(Worker(apart.MODULE)) as worker, pytest.raises(StartError) as refused:
        components.Language.load(checkpoint, Config(), worker)
    assert str(refused.value) == fault


def test_all_faults_are_reported_together(checkpoint: Path) -> None:
    describe(architectures=["Nonsense"])(checkpoint)
    truncate(checkpoint)
    (checkpoint / "tokenizer.json").unlink()

    assert len(examine(checkpoint, config(checkpoint)).faults) == 3


def test_checks_left_to_start_are_listed(checkpoint: Path) -> None:
    assert examine(checkpoint, config(checkpoint)).unchecked == [
        "whether the weights are those that the model needs, and fit into memory"
    ]
    gpu = msgspec.structs.replace(config(checkpoint), device=DeviceConfig(kind="cuda"))
    assert "the capabilities of the GPU and of its kernels" in examine(checkpoint, gpu).unchecked
    describe(**GPT_NEOX)(checkpoint)
    found = examine(checkpoint, config(checkpoint))
    assert (found.own, found.faults) == (False, [])
    assert "whether transformers' code for GPTNeoXForCausalLM runs over infd's attention" in found.unchecked


def test_int8_weights_are_accepted_for_a_cpu_and_refused_for_a_gpu(checkpoint: Path) -> None:
    settings = msgspec.structs.replace(config(checkpoint, quantization="int8"), device=DeviceConfig(kind="cuda"))

    faults = examine(checkpoint, settings).faults

    assert faults[0].startswith("model.quantization: no linear kernel supports 'int8' on cuda")
    assert "native int8: runs on a CPU, not on cuda" in faults[0]


def test_the_null_device_needs_no_weights_and_no_known_architecture(checkpoint: Path) -> None:
    remove(checkpoint)
    describe(architectures=["Nonsense"])(checkpoint)
    settings = msgspec.structs.replace(config(checkpoint), device=DeviceConfig(kind="null"))

    assert (found := examine(checkpoint, settings)).faults == []
    assert found.unchecked == []


def test_a_hub_model_is_checked_if_it_is_cached_completely(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    shutil.copytree(checkpoint, snapshot)
    environment = Environment(hub=HubAccess(cache=tmp_path))
    settings = msgspec.structs.replace(config(checkpoint), model=ModelConfig(path="org/name", max_model_len=10**6))

    with pytest.raises(ConfigError, match="the model's context length is"):
        check(settings, environment)
    remove(snapshot)
    assert check(settings, environment) == ["org/name, which is not here: `infd start` fetches it"]


def test_adapters_are_checked(checkpoint: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(embedded.adapters() / "pirate", tmp_path / "adapter")
    settings = msgspec.structs.replace(config(checkpoint), lora=LoraConfig(modules={"a": str(adapter)}))
    assert "whether the adapters fit the model" in check(settings, Environment())

    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: the header describes"):
        check(settings, Environment())


def test_faults_are_found_without_torch(checkpoint: Path) -> None:
    describe(architectures=["MptForCausalLM"], model_type="mpt")(checkpoint)
    arguments = ["config", "check", "--model", str(checkpoint)]
    code = (
        "import sys\nfrom infd.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit as left: print(left.code)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["78", "[]"]
    assert "MptForCausalLM" in done.stderr


def test_transformers_decoders_are_known_without_importing_it() -> None:
    assert known.decoders() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert known.decoders() >= known.BIASED | known.RECURRENT


def test_a_library_of_grammars_that_is_not_installed_ends_the_start(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = msgspec.structs.replace(config(checkpoint), grammar=GrammarConfig(engine="xgrammar"))

    with pytest.raises(ConfigError, match=r"grammar\.engine: .*install infd\[xgrammar\]") as checked:
        check(settings, Environment())
    with pytest.raises(ConfigError, match=r"grammar\.engine: xgrammar"):
        Daemon(settings, Environment())
    assert checked.value.exit_code == os.EX_CONFIG == 78
