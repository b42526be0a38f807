"""`infd config check`: apply the checks of `infd start`, without importing torch, loading weights or fetching files."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from infd.adapters.files import locate
from infd.adapters.peft import PeftConfig
from infd.apart.client import Worker
from infd.daemon import resolve
from infd.daemon.examine import Examined, examine, weight_files
from infd.errors import CheckpointError, ConfigError
from infd.http.proxies import networks
from infd.http.rates import tenants
from infd.hub.cached import cached
from infd.hub.fetch import find_gguf, split
from infd.kernels.cpu.built import why_not_built
from infd.mcp.servers import Servers
from infd.runner.arenas.host import kind
from infd.sockets import tls
from infd.text import apart, renderers
from infd.text.chat import ChatTemplate
from infd.text.syntax import check_names
from infd.weights.checkpoint import TensorFile

if TYPE_CHECKING:
    from pathlib import Path

    from infd.config import Config, Environment


def check(config: Config, environment: Environment) -> list[str]:
    """Return a line for each condition that only `infd start` can check.

    Raises ConfigError with a line for each error found.
    """
    directory: Path | None = None
    found = Examined()

    def model() -> None:
        nonlocal directory
        directory = resolve.checkpoint(config, environment.models)

    def template() -> None:
        if config.model.chat_template and directory is None:  # with a directory, examine() checks the template
            with closing(Worker(apart.MODULE)) as worker:
                ChatTemplate.of_file(config.model.chat_template, worker=worker)

    def parsers() -> None:
        if directory is None:  # with a directory, examine() chooses the syntaxes
            renderers.check_name(config.model.renderer)
            check_names(reasoning_name=config.model.reasoning_parser, tools_name=config.model.tool_parser)

    def adapters() -> None:
        for path in config.lora.modules.values():
            files = locate(path)
            PeftConfig.read(files.config)
            TensorFile(files.tensors).close()

    found.collect(model)
    if directory is None and not found.faults:
        directory = _fetched(config, environment)
        if directory is None:
            found.unchecked.append(f"{config.model.path}, which is not here: `infd start` fetches it")
    if directory is not None:
        examined = examine(directory, config)
        found.faults += examined.faults
        found.unchecked += examined.unchecked
    found.collect(template)
    found.collect(parsers)
    found.collect(lambda: resolve.keys(config, environment))
    found.collect(lambda: tenants(config.quotas))
    found.collect(lambda: networks(config.server.trusted_proxies))
    found.collect(lambda: tls.context(config.server))
    found.collect(lambda: resolve.require_grammar_engine(config))
    found.collect(lambda: Servers.read(config.mcp))
    found.collect(adapters)
    if config.server.idle_exit_s is not None:
        found.unchecked.append("whether systemd passes a socket (server.idle_exit_s)")
    if config.lora.modules:
        found.unchecked.append("whether the adapters fit the model")
    if found.faults:
        raise ConfigError("\n".join(found.faults))
    return found.unchecked


def slow(config: Config) -> str | None:
    """Return the reason why a CPU would compute without native kernels, or None."""
    return why_not_built() if kind(config) == "cpu" else None


def _fetched(config: Config, environment: Environment) -> Path | None:
    """Return the directory, or the GGUF file, of a complete model in the Hugging Face cache.

    None: no such model, a weight file is missing, or model.revision or another hub is set.
    """
    if config.model.hub != "huggingface" or config.model.revision:
        return None
    name, tag = split(config.model.path)
    directory = dict(cached(environment.hub)).get(name)
    if directory is not None and tag is not None:
        directory = find_gguf(directory, tag)
    try:
        whole = directory is not None and all(path.exists() for path in weight_files(directory))
    except CheckpointError:  # malformed index; examine() reports the error
        whole = True
    return directory if whole else None
