"""Decide from config.json alone whether transformers can compute a model, and name the reason if not.

This module builds no model. It runs code of the installed transformers only, never of the checkpoint's repository.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from infd.errors import CheckpointError
from infd.models.config import Settings
from infd.models.transformers.known import decoder_class, reasons, require
from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Mapping

log.adopt("transformers")

MOST_LAYERS = 4096
TOWERS = ("vision_config", "audio_config")
# Output settings that infd needs; a saved config may contain other values.
RETURNED = {"return_dict": True, "use_cache": False, "output_attentions": False, "output_hidden_states": False}
DECODED = ("quantization_config", "compression_config")  # not passed on: loading decodes the weights


class Admitted(NamedTuple):
    """A model class of transformers, and the config object from which to build the model."""

    model: Any
    config: Any


def admit(config: Mapping[str, Any]) -> Admitted:
    """Return transformers' class and config for a config.json. Raises CheckpointError with the first obstacle."""
    require(config)
    name = decoder_class(config)
    assert name is not None
    admitted = Admitted(getattr(transformers, name), read_config(config))
    for tower in TOWERS:
        if tower in admitted.config.sub_configs and getattr(admitted.config, tower, None) is not None:
            raise CheckpointError(f"it reads more than text ({tower})")
    for reason in reasons(name, lambda key: getattr(admitted.config, key, None)):
        raise CheckpointError(reason)
    return admitted


def admit_whole_texts(config: Mapping[str, Any], classes: str) -> Admitted:
    """Return transformers' class and config of a model that is computed text by text. Raises CheckpointError.

    classes  name of transformers' table of classes, by type of config
    """
    require(config)
    read = read_config(config)
    table = getattr(transformers, classes)
    if type(read) not in table:
        raise CheckpointError(f"transformers {transformers.__version__} has no such class for this model_type")
    return Admitted(table[type(read)], read)


def read_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' config object for a config.json. Raises CheckpointError."""
    kind = Settings(config).string("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(f"transformers {transformers.__version__} does not know model_type {kind!r}")
    try:
        plain = {key: value for key, value in config.items() if key not in DECODED}
        read = transformers.CONFIG_MAPPING[kind].from_dict({**plain, **RETURNED})
    except Exception as error:  # config classes raise arbitrary exceptions for invalid values
        raise CheckpointError(f"transformers cannot read config.json: {error}") from error
    layers = getattr(read, "num_hidden_layers", None)
    Settings({"num_hidden_layers": layers}).integer("num_hidden_layers", most=MOST_LAYERS)
    return read
