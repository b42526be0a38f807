"""Convert the fields of llama.cpp's samplers to parameters.

llama.cpp's chain: penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature. A request with typical_p,
top_n_sigma, XTC, dynamic temperature or `samplers` is limited in this order; any other is cooled before its limits, as
by vLLM. Mirostat replaces all limits. A sampler that `samplers` does not name is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.errors import InvalidRequest, Unsupported
from infd.request import Breakers, Chain, Dry, Mirostat

if TYPE_CHECKING:
    from infd.http.schema.sampling import GenerationFields
    from infd.http.served_model import ServedModel
    from infd.offload import Offload

CHAIN: Final = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
# Other names that llama.cpp accepts.
ALIASES: Final = {
    "top-n-sigma": "top_n_sigma",
    "top-k": "top_k",
    "typical_p": "typ_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "top-p": "top_p",
    "nucleus": "top_p",
    "min-p": "min_p",
    "temp": "temperature",
}
BREAKERS: Final = ("\n", ":", '"', "*")  # llama.cpp's default
MOST_BREAKER_BYTES: Final = 256


def enabled(fields: GenerationFields) -> frozenset[str]:
    """Return the names, as in CHAIN, of the samplers that the request does not switch off. Raises Unsupported."""
    if fields.samplers is None:
        return frozenset(CHAIN)
    names = [ALIASES.get(name, name) for name in fields.samplers]
    for name in names:
        if name not in CHAIN:
            raise Unsupported(f"the sampler {name!r}", param="samplers")
    if names != [name for name in CHAIN if name in names]:
        raise Unsupported(f"an order of samplers other than {', '.join(CHAIN)}", param="samplers")
    return frozenset(names)


def chain(fields: GenerationFields, temperature: float) -> Chain | None:
    """Return the limits of llama.cpp's chain; None: the temperature comes first. Raises InvalidRequest, Unsupported."""
    on = enabled(fields)
    sigma, typical = fields.top_n_sigma or 0.0, 1.0 if fields.typical_p is None else fields.typical_p
    probability, threshold = fields.xtc_probability or 0.0, fields.xtc_threshold
    found = Chain(
        top_n_sigma=max(sigma, 0.0) if "top_n_sigma" in on else 0.0,
        typical_p=typical if "typ_p" in on else 1.0,
        xtc_probability=probability if "xtc" in on else 0.0,
        xtc_threshold=0.1 if threshold is None else threshold,
        dynatemp_range=fields.dynatemp_range or 0.0 if "temperature" in on else 0.0,
        dynatemp_exponent=1.0 if fields.dynatemp_exponent is None else fields.dynatemp_exponent,
    )
    if found.dynatemp_range and not temperature:
        raise InvalidRequest("dynatemp_range is only for temperatures above 0", param="dynatemp_range")
    active = (
        found.top_n_sigma > 0
        or found.typical_p < 1
        or (found.xtc_probability > 0 and found.xtc_threshold <= 0.5)
        or found.dynatemp_range > 0
    )
    return found if active or fields.samplers is not None else None


def mirostat(fields: GenerationFields) -> Mirostat | None:
    """Return mirostat's parameters; None: off."""
    if not fields.mirostat:
        return None
    tau, eta = fields.mirostat_tau, fields.mirostat_eta
    return Mirostat(fields.mirostat, 5.0 if tau is None else tau, 0.1 if eta is None else eta)


def dry(fields: GenerationFields, breakers: Breakers) -> Dry | None:
    """Return the parameters of the DRY penalty; None: off."""
    if not penalizes_repeats(fields):
        return None
    base, allowed, window = fields.dry_base, fields.dry_allowed_length, fields.dry_penalty_last_n
    return Dry(
        multiplier=fields.dry_multiplier or 0.0,
        base=1.75 if base is None or base < 1 else base,
        allowed_length=2 if allowed is None else allowed,
        window=64 if window is None else None if window == -1 else window,
        breakers=breakers,
    )


def penalizes_repeats(fields: GenerationFields) -> bool:
    """Return whether the DRY penalty is on."""
    return bool(fields.dry_multiplier) and fields.dry_penalty_last_n != 0 and "dry" in enabled(fields)


async def breakers(fields: GenerationFields, served: ServedModel, offload: Offload) -> Breakers:
    """Return the tokens of the request's sequence breakers. Raises InvalidRequest, Unsupported."""
    strings = BREAKERS if fields.dry_sequence_breakers is None else tuple(fields.dry_sequence_breakers)
    if not penalizes_repeats(fields) or not strings:
        return Breakers()
    if sum(len(text.encode()) for text in strings) > MOST_BREAKER_BYTES:
        raise InvalidRequest(
            f"dry_sequence_breakers come to more than {MOST_BREAKER_BYTES} bytes", param="dry_sequence_breakers"
        )
    tokenizer = served.tokenizer
    if "breakers" in vars(tokenizer) and (found := tokenizer.breakers.known(strings)) is not None:
        return found
    run = offload.apart if tokenizer.apart else offload
    return await run(lambda: tokenizer.breakers.find(strings))
