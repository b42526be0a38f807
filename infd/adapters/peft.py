"""Read PEFT's adapter_config.json, and refuse features that infd does not compute.

`_NEUTRAL` lists the fields of unsupported features, and the values with which
they have no effect; any other value is refused. The adapter's tensors determine
which modules change. Regular expressions are never run, because they are
untrusted: in `target_modules` a regular expression is ignored, in
`rank_pattern` and `alpha_pattern` it is refused.
"""

from __future__ import annotations

import re
from math import isfinite, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from infd.errors import CheckpointError
from infd.untrusted import read

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

MOST_RANK = 256
CONFIG_BYTES = 2**20

# By field of an unsupported feature, the values with which the field has no effect.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "bias": (None, "none"),
        "use_dora": (None, False),
        "lora_bias": (None, False),
        "use_qalora": (None, False),
        "ensure_weight_tying": (None, False),
        "trainable_token_indices": (None, [], {}),
        "layer_replication": (None, []),
        "alora_invocation_tokens": (None, []),
        "megatron_config": (None, {}),
        "use_bdlora": (None, False),
        "arrow_config": (None,),
        "kasa_config": (None,),
        "monteclora_config": (None,),
    }
)
# Initializations that keep the base weights; other initializations subtract the initial adapter from the base weights.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
# Prefix of keys that PEFT makes from names of single experts' modules. A key matches the end of a name without it too.
_ANYWHERE = r".*\."
_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:\.post\d+)?")
_NAME = re.compile(r"\^?[\w.\\]+")

N = TypeVar("N", int, float)
Rank = Annotated[int, Meta(ge=1)]


class PeftConfig(Struct):
    """The fields of adapter_config.json that determine ranks, scales and modules.

    r, lora_alpha      rank and alpha of modules that match no key of rank_pattern or alpha_pattern
    target_parameters  names of parameters, for example of those that stack the matrices of all experts
    peft_version       of the PEFT that wrote the file, from 0.18.0 on
    """

    peft_type: str
    r: Rank = 8
    lora_alpha: float = 8.0
    base_model_name_or_path: str | None = None
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    use_rslora: bool | None = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    peft_version: str | None = None

    @classmethod
    def read(cls, path: Path) -> PeftConfig:
        """Read the file at `path`. Raises CheckpointError for a malformed file and for unsupported features."""
        try:
            document: dict[str, Any] = msgspec.json.decode(read(path, CONFIG_BYTES), type=dict[str, Any])
            config = msgspec.convert(document, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path}: malformed: {error}") from error
        if config.peft_type != "LORA":
            raise CheckpointError(f"{path}: peft_type is {config.peft_type!r}; infd computes LORA")
        for name, neutral in _NEUTRAL.items():
            if document.get(name) not in neutral:
                raise CheckpointError(
                    f"{path}: {name} is {_brief(document[name])}; infd computes plain LoRA without it"
                )
        initial = document.get("init_lora_weights")
        if initial not in _INITIAL:
            raise CheckpointError(
                f"{path}: init_lora_weights is {_brief(initial)}: such an adapter needs changed base weights;"
                " let PEFT convert it when saving (path_initial_model_for_weight_conversion)"
            )
        for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
            if not isfinite(alpha):
                raise CheckpointError(f"{path}: lora_alpha is {alpha}")
        for field in ("rank_pattern", "alpha_pattern"):
            for key in getattr(config, field) or {}:
                if not _NAME.fullmatch(key.removeprefix(_ANYWHERE)):
                    raise CheckpointError(
                        f"{path}: {field}: {_brief(key)} is a regular expression; infd supports only names of modules"
                    )
        return config

    def rank(self, module: str) -> int:
        """Return the configured rank of a module of the base model."""
        return _value_for(module, self.rank_pattern, self.r)

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module's low-rank update."""
        return _value_for(module, self.alpha_pattern, self.lora_alpha) / (sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Return whether target_modules lists `module`, or target_parameters its weight.

        True if target_modules is a regular expression, or if neither is given.
        """
        names, parameters = self.target_modules, self.target_parameters or ()
        if isinstance(names, str) or (names is None and not parameters):
            return True
        return any(_matches(name, module) for name in names or ()) or self.targets_parameter(f"{module}.weight")

    def targets_parameter(self, parameter: str) -> bool:
        """Return whether target_parameters lists `parameter`."""
        return any(_matches(name, parameter) for name in self.target_parameters or ())

    def turned(self, *, transposed: bool) -> bool | None:
        """Return whether factors of a stacked parameter are turned, see Change in fit.py; None: unknown.

        transposed  see Target in fit.py

        Until 0.18 PEFT took a parameter's dimensions for experts, inputs and outputs. It swaps the last two if the
        module has transformers' mark of transposed matrices in 0.19.0, and if it has not from 0.19.1 on. Which modules
        with transposed matrices have that mark depends on the version of transformers, which the file does not state.
        """
        if not (numbers := _RELEASE.fullmatch(self.peft_version or "")):
            return None
        version = tuple(map(int, numbers.groups()))
        if transposed:
            return False if version < (0, 19, 0) else None
        return version < (0, 19, 1)

    def unmet(self, changed: Collection[str]) -> list[str]:
        """Return the listed target modules and parameters that match none of those in `changed`."""
        modules = self.target_modules if isinstance(self.target_modules, list) else []
        weights = [*changed, *(f"{module}.weight" for module in changed)]
        named = {"target_modules": (modules, changed), "target_parameters": (self.target_parameters or (), weights)}
        return [
            f"{field} names {name}"
            for field, (names, present) in named.items()
            for name in names
            if not any(_matches(name, each) for each in present)
        ]

    def saves(self, module: str) -> bool:
        """Return whether modules_to_save lists `module`, or a module that contains it."""
        return any(_matches(name, module[:end]) for name in self.modules_to_save or () for end in _ends(module))


def _value_for(module: str, pattern: Mapping[str, N] | None, default: N) -> N:
    """Return the value of the first key in `pattern` that matches `module`, else `default`."""
    return next((value for key, value in (pattern or {}).items() if _matches(key, module)), default)


def _matches(key: str, module: str) -> bool:
    """Return whether `key` equals `module`, or the end of `module` after a dot.

    A key that begins with ^ must equal the whole name.
    """
    name = key.removeprefix(_ANYWHERE).replace("\\.", ".")
    return module == name.removeprefix("^") or (not name.startswith("^") and module.endswith("." + name))


def _ends(module: str) -> list[int]:
    """Return the ends of a module's name, and of the names of the modules that contain it."""
    return [*(at for at, character in enumerate(module) if character == "."), len(module)]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
