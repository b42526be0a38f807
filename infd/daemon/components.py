"""Build a daemon's components from its settings, without loading weights or importing torch."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from infd.daemon.fingerprint import fingerprint
from infd.errors import CheckpointError, ConfigError
from infd.executors import null
from infd.gguf import is_gguf
from infd.grammar.protocol import Vocabulary
from infd.http.served_model import SamplingDefaults, ServedModel
from infd.http.store.memory import MemoryStore
from infd.http.store.sqlite import SqliteStore
from infd.hub.fetch import split
from infd.pooling import PoolingSettings, configured
from infd.text.chat import ChatTemplate
from infd.text.infill import Infill
from infd.text.syntax import Syntax
from infd.text.tokenizer import Tokenizer
from infd.untrusted import read
from infd.weights.checkpoint import read_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from infd.apart.client import Worker
    from infd.config import Config, Environment, HubAccess, LiveConfig
    from infd.engine.executor import Executor
    from infd.http.served_model import Adapters
    from infd.http.store.entry import Store
    from infd.hub.fetch import Hub
    from infd.offload import Offload
    from infd.runner.pulse import Pulse
    from infd.runner.start.assembly import Loaded
    from infd.scheduler.layout import Capacity


class Language(Struct, frozen=True):
    """A checkpoint's text components: tokenizer, chat template, markup syntax and sampling defaults.

    fingerprint  see fingerprint.py
    pooling      how prompts become embeddings or scores; without tasks: the model generates
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    syntax: Syntax
    defaults: SamplingDefaults
    fingerprint: str
    pooling: PoolingSettings

    @classmethod
    def load(cls, directory: Path, config: Config, worker: Worker) -> Language:
        """Load the text components from a checkpoint's directory, in a fraction of a second.

        worker  process that runs a template or tokenizer to which `text/vetting` objects

        Raises CheckpointError, ConfigError.
        """
        model, tokenizer = config.model, Tokenizer.load(directory, worker)
        template = ChatTemplate.load(tokenizer, model.chat_template or None, worker, renderer=model.renderer)
        syntax = Syntax.choose(
            tokenizer,
            template,
            reasoning_name=model.reasoning_parser,
            tools_name=model.tool_parser,
            response_template=tokenizer.files.tokenizer_config.get("response_template"),
        )
        defaults = SamplingDefaults.read(tokenizer.files.generation_config)
        pooling = configured(config.pooling, directory, read_config(directory))
        if config.device.kind == "null":
            pooling = null.invented(pooling)
        return cls(tokenizer, template, syntax, defaults, fingerprint(directory), pooling)

    def vocabulary(self, capacity: Capacity) -> Vocabulary | None:
        """Return the vocabulary for grammars; None if the text of a token may depend on its neighbours."""
        tokenizer = self.tokenizer
        if (spellings := tokenizer.spellings()) is None:
            return None
        return Vocabulary(
            tokens=spellings[: capacity.vocab_size],
            special=tokenizer.special_ids,
            end_ids=tokenizer.end_ids,
            columns=capacity.vocab_size,
            encode=partial(tokenizer.encode, add_special_tokens=False),
            drop_space=tokenizer.drops_space,
        )

    def serve(self, names: tuple[str, ...], capacity: Capacity, adapters: Adapters) -> ServedModel:
        """Return the model's names, limits and text components, for the HTTP server."""
        tasks = self.pooling.tasks
        return ServedModel(
            names=names,
            created=int(time.time()),
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            tokenizer=self.tokenizer,
            template=self.template,
            syntax=self.syntax,
            defaults=self.defaults,
            adapters=adapters,
            fingerprint=self.fingerprint,
            infill=Infill.choose(self.tokenizer),
            generates=capacity.generates and not tasks,
            experts=capacity.experts,
            pools=tuple(task for task in capacity.pools if not tasks or task in tasks),
            pooling=self.pooling,
        )


def hub(config: Config, access: HubAccess) -> Hub:
    """Return the hub from which the model is fetched. Raises ConfigError if the hub's library is not installed."""
    (name, _), revision = split(config.model.path), config.model.revision or None
    if config.model.hub == "modelscope":
        from infd.hub.modelscope import ModelScope

        return ModelScope(name, revision)
    from infd.hub.huggingface import HuggingFace

    return HuggingFace(name, revision, access)


def store(live: LiveConfig, offload: Offload) -> Store:
    """Return the store of responses and conversations that the settings select."""
    return SqliteStore(live, offload) if live.now.store.path else MemoryStore(live)


def executor(
    config: Config, environment: Environment, directory: Future[Path], progress: Callable[[int, int], None]
) -> Executor:
    """Return the executor that the settings select.

    directory  the checkpoint's directory; has a result before the executor loads the model
    progress   called with (bytes read, bytes to read) while weights are read
    """
    if config.device.kind == "null":
        if config.device.own_process:
            raise ConfigError("device.own_process: the null device computes nothing and needs no process; unset it")
        return null.NullExecutor(
            config, lambda: NullSizes.read(directory.result()), lambda: directory.result().absolute().parent
        )
    if config.device.own_process:
        from infd.executors.remote import RemoteExecutor

        return RemoteExecutor(
            lambda: located(config, environment, directory.result()),
            progress,
            journal_stream=environment.journal_stream,
        )
    from infd.executors.local import LocalExecutor, build_runner

    def build(config: Config, pulse: Pulse) -> Loaded:
        return build_runner(located(config, environment, directory.result()), pulse, progress)

    return LocalExecutor(config, build)


def located(config: Config, environment: Environment, directory: Path) -> Config:
    """Return the settings, with `directory` as model.path and the kernel cache's directory as device.kernel_cache."""
    replace, kernels = msgspec.structs.replace, environment.kernel_cache(config)
    return replace(
        config,
        model=replace(config.model, path=str(directory)),
        device=replace(config.device, kernel_cache="" if kernels is None else str(kernels)),
    )


class NullSizes(Struct, frozen=True):
    """The two fields of config.json that the null executor reads."""

    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def read(cls, directory: Path) -> NullSizes:
        if is_gguf(directory):
            return msgspec.convert(read_config(directory), cls)
        path = directory / "config.json"
        try:
            return msgspec.json.decode(read(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
