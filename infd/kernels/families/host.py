"""Carry arrays from the host to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]
Upload = Callable[[Array], Tensor]  # copies to the device what the host gathered
Fill = Callable[[Tensor, Array], None]  # the same, to where it lies on the device, [n]
