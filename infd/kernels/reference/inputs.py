"""Quantize inputs of products, and decode them again, in plain torch.

A dynamic scale is the largest magnitude of the numbers that share it, divided by the largest number of the type; for
MX formats and ue8m0 the next power of two. Integers have 127 as the largest number, as in vLLM; compressed-tensors'
own emulation divides by 127.5. MXFP4 and NVFP4 are as in compressed-tensors: a power of two may be too small for the
largest numbers, which then become 6, and the scale of a group of NVFP4 is a number of E4M3 times the stored scale.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

from infd.kernels.reference.float8 import LARGEST

if TYPE_CHECKING:
    from torch import Tensor

    from infd.input_scheme import InputScheme

MOST: Final = MappingProxyType({"int8": 127.0, "e4m3": LARGEST, "e2m1": 6.0})  # largest number of each type
LEAST_E4M3: Final = 0.125  # in place of a group's scale that is 0
SMALLEST: Final = 2.0**-120  # inputs of MXFP4 of which the largest is smaller become 0


class Inputs:
    """Implements families.inputs.Inputs."""

    def why_not(self, scheme: InputScheme) -> str:
        if scheme.numbers == "e2m1" and not scheme.inputs:
            return "no kernel rounds to e2m1 with one scale for a token"
        return "" if scheme.numbers in MOST else f"no kernel rounds to {scheme.numbers}"

    def round(self, x: Tensor, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        values = x.float()
        if scheme.inputs:
            values = F.pad(values, (0, -x.shape[1] % scheme.inputs)).unflatten(1, (-1, scheme.inputs))
        if scheme.inputs and scheme.static:
            assert scale is not None
            scale = local_scales(values, scale) * scale
        elif scale is None:
            scale, zero = zero_based(values) if scheme.zeros else (scales_of(values, scheme), None)
        found = _nearest(values / scale, scheme, zero) * scale
        return (found.flatten(1)[:, : x.shape[1]] if scheme.inputs else found).to(x.dtype)


class Unrounded:
    """Implements families.inputs.Inputs without rounding."""

    def why_not(self, scheme: InputScheme) -> str:
        return "--exact-activations"

    def round(self, x: Tensor, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        return x


def scales_of(values: Tensor, scheme: InputScheme) -> Tensor:
    """Return the symmetric scale of each of the last axis's numbers, [..., 1] float32; 1 if all are 0."""
    most = values.abs().amax(-1, keepdim=True)
    scale = most / MOST[scheme.numbers]
    if scheme.powers and scheme.numbers == "e2m1":
        half, exponent = torch.frexp(most)
        exponent += (half >= 0.875).int() - 3  # the power of two by which most becomes at least 3.5, and less than 7
        scale = torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent), scale)
        scale = torch.where(most < SMALLEST, 0.0, scale)
    elif scheme.powers:
        half, exponent = torch.frexp(scale)  # scale is half * 2 ** exponent, half is from 0.5 to below 1
        exponent -= (half == 0.5).int()
        scale = torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent), scale)
    return torch.where(scale == 0, 1.0, scale)


def local_scales(values: Tensor, scale: Tensor) -> Tensor:
    """Return numbers of E4M3, [..., 1] float32: times `scale`, the scales of the last axis's numbers as fp4."""
    most = values.abs().amax(-1, keepdim=True)
    local = (most / MOST["e2m1"] / scale).clamp(max=LARGEST).to(torch.float8_e4m3fn).float()
    return torch.where(local == 0, LEAST_E4M3, local)


def zero_based(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points by which integers from -128 to 127 represent the range of the last axis and 0."""
    least, most = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    scale = (most - least) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    return scale, (-128 - least / scale).clamp(-128, 127).round()


def _nearest(scaled: Tensor, scheme: InputScheme, zero: Tensor | None) -> Tensor:
    """Return the nearest numbers of the scheme's type, float32; integers minus their zero point."""
    if scheme.numbers == "e4m3":
        return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    if scheme.numbers == "e2m1":
        found = scaled.clamp(-MOST["e2m1"], MOST["e2m1"])
        step = torch.where(found.abs() < 2, 0.5, torch.where(found.abs() < 4, 1.0, 2.0))
        return (found / step).round() * step
    if zero is None:
        return scaled.round().clamp(-128, 127)
    return (scaled + zero).round().clamp(-128, 127) - zero
