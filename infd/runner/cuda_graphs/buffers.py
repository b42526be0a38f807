"""Choose the captured sizes of decoding steps, and allocate the persistent input buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.families.attention import AttentionBatch
from infd.kernels.families.rows import DecodeInputs

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import CapturedPlan
    from infd.runner.instance import Instance

LOGITS_BYTES = 2**25  # the head is captured in steps whose logits occupy at most this many bytes


def sizes(most: int) -> list[int]:
    """Return the captured sizes for steps of up to `most` sequences.

    Padding a step to the next size adds at most 3 rows, or an eighth of the step's rows if that is more.
    """
    captured = [1, 2, 4]
    while captured[-1] < most:
        captured.append(captured[-1] + max(4, captured[-1] // 8 // 4 * 4))
    return [size for size in captured if size < most] + [most]


class Buffers:
    """Persistent input buffers of decoding steps. N is the largest size; smaller sizes use the front of each buffer.

    sent      [3 N] int64, uploaded for each step, for a size n: [n] rows; [n] upper bounds of the tokens' positions; if
              angles have regimes, [n] offsets from a position to its row in the tables of rotary angles
    position  [N] int64: each token's position
    start     [N] int32: `position`, in the dtype that attention needs
    token     [N] int64: each token
    tables    by page group, [N, pages] int32
    slots     by page group, [N] int64
    logits    [M, vocab] in the model's logits_dtype; M: the largest size whose head is captured
    """

    def __init__(self, instance: Instance, most: int) -> None:
        self._instance = instance
        rows, groups = instance.rows, len(instance.layout.groups)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        self.sent = zeros(3 * most, dtype=torch.int64)
        self.position = zeros(most, dtype=torch.int64)
        self.start = zeros(most, dtype=torch.int32)
        self.token = zeros(most, dtype=torch.int64)
        self.tables = [zeros(most, rows.tables.shape[2], dtype=torch.int32) for _ in range(groups)]
        self.slots = [zeros(most, dtype=torch.int64) for _ in range(groups)]
        dtype = instance.model.logits_dtype
        small = [size for size in sizes(most) if dtype.itemsize * size * rows.vocab_size <= LOGITS_BYTES]
        self.logits = zeros(max(small, default=0), rows.vocab_size, dtype=dtype)

    def inputs(self, size: int) -> DecodeInputs:
        """Return the front of each buffer, for steps of `size` rows."""
        groups = self._instance.layout.groups
        return DecodeInputs(
            row=self.sent[:size],
            bound=self.sent[size : 2 * size],
            position=self.position[:size],
            start=self.start[:size],
            token=self.token[:size],
            page_tokens=[group.page_tokens for group in groups],
            tables=[table[:size] for table in self.tables],
            slots=[slots[:size] for slots in self.slots],
        )

    def plans(self, size: int) -> list[CapturedPlan] | None:
        """Return attention plans for captured steps of `size` rows, by page group; None if not supported."""
        rows, groups = self._instance.rows, self._instance.layout.groups
        if any(group.chunk is not None for group in groups):  # gathered tables begin with the sequence, not its chunk
            return None
        batches = (
            AttentionBatch(
                page_tokens=group.page_tokens,
                window=group.window,
                starts=[rows.max_len - 1] * size,
                counts=[1] * size,
                offsets=list(range(size + 1)),
                start=self.start[:size],
                table=table[:size],
                slots=slots[:size],
                upload=rows.staging.up,
            )
            for group, table, slots in zip(groups, self.tables, self.slots, strict=True)
        )
        plans = [plan for plan in map(self._instance.ops.attention.captured, batches) if plan is not None]
        return plans if len(plans) == len(groups) else None
