"""Batches of whole texts, for models without a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from infd.kernels.reference.pooling import Pooling
from infd.pooling import PoolingSettings
from infd.request import Pool
from infd.runner.readouts.pooling import TextPooling, TokenPooling
from infd.runner.texts import Texts
from infd.scheduler.layout import CacheLayout, Regimes
from infd.scheduler.plan import Join, Span, StepPlan
from tests.runner.driving import make_rows

if TYPE_CHECKING:
    from infd.pooling.settings import Reduction


class Slots:
    """The adapters of rows, by slot."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots.tolist()

    def at(self, rows: np.ndarray) -> Slots:
        return Slots(np.array(self.slots)[rows])


class Encoder:
    """Texts with the readouts that pool, over a model that no test computes."""

    def __init__(
        self,
        *,
        least_rows: int = 1,
        regimes: Regimes | None = None,
        pooling: Reduction = "mean",
        skips_unsampled: bool = True,
    ) -> None:
        layout = CacheLayout((), divisible=False, regimes=regimes or Regimes())
        instance: Any = SimpleNamespace(
            model=SimpleNamespace(least_rows=least_rows, skips_unsampled=skips_unsampled),
            layout=layout,
            rows=make_rows(rows=4, page_tokens=()),
            cache=(),
            adapters=SimpleNamespace(adapted=Slots),
            pooling=PoolingSettings(pooling=pooling),
            ops=SimpleNamespace(pooling=Pooling()),
        )
        self.texts = Texts(instance)
        self.readouts = TextPooling(instance), TokenPooling(instance)

    def join(self, row: int, tokens: list[int], pool: Pool, **fields: Any) -> None:
        joins = [Join(row, tokens, len(tokens), (pool,), [], 0, **fields)]
        self.texts.stage(StepPlan(0, joins, [], []))
        for readout in self.readouts:
            readout.stage(joins)

    def gather(self, *counts: tuple[int, int]):
        """Gather spans of (row, tokens)."""
        return self.texts.gather([Span(row, 0, count, 0, pools=count) for row, count in counts], self.readouts)


EMBED = Pool("embed")


def test_texts_are_packed_in_the_order_of_their_spans():
    encoder = Encoder()
    encoder.join(3, [7, 8, 9], EMBED)
    encoder.join(1, [5], EMBED)
    gathered = encoder.gather((1, 1), (3, 3))

    batch = gathered.batch
    assert batch.tokens.tolist() == [5, 7, 8, 9]
    assert batch.positions.tolist() == [0, 0, 1, 2]
    assert batch.offsets == [0, 1, 4]
    assert batch.tokens.dtype == batch.positions.dtype == torch.int64
    assert batch.types is batch.prompts is batch.adapters is None


def test_a_row_has_the_text_that_joined_last():
    encoder = Encoder()
    encoder.join(0, [7, 8, 9], Pool("embed", second=1), regime=5)
    encoder.join(0, [4, 6], EMBED)
    batch = encoder.gather((0, 2)).batch
    assert batch.tokens.tolist() == [4, 6]
    assert batch.types is batch.prompts is None


def test_each_readout_selects_its_tokens_and_reads_all_states_if_these_are_all_tokens():
    encoder = Encoder()
    encoder.join(0, [7, 8, 9], Pool("embed", skip=1))
    encoder.join(1, [5], Pool("token_embed"))
    states = torch.arange(4)
    whole, by_token = encoder.gather((0, 3), (1, 1)).selections
    assert whole.of(states).tolist() == [1, 2]
    assert by_token.of(states).tolist() == [3]

    encoder.join(0, [7, 8], EMBED)
    whole, by_token = encoder.gather((0, 2)).selections
    assert whole.of(states[:2]) is not None
    assert whole.narrowed
    assert by_token is None


def test_a_small_step_is_padded_with_token_0_at_position_0():
    encoder = Encoder(least_rows=4)
    encoder.join(0, [7, 8, 9], Pool("embed", second=2))
    gathered = encoder.gather((0, 3))
    assert gathered.batch.tokens.tolist() == [7, 8, 9, 0]
    assert gathered.batch.positions.tolist() == [0, 1, 2, 0]
    assert gathered.batch.types.tolist() == [0, 0, 1, 0]
    assert gathered.batch.offsets == [0, 3]
    assert not gathered.selections[0].narrowed
    assert gathered.selections[0].of(torch.arange(4)).tolist() == [0, 1, 2]


def test_tokens_of_a_pairs_second_text_have_type_1():
    encoder = Encoder()
    encoder.join(0, [1, 2, 3], Pool("embed", second=1))
    encoder.join(1, [4, 5], EMBED)
    encoder.join(2, [6, 7], Pool("embed", second=0))
    assert encoder.gather((0, 3), (1, 2), (2, 2)).batch.types.tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert encoder.gather((1, 2)).batch.types is None


def test_rotary_angles_depend_on_the_regime_of_a_text():
    encoder = Encoder(least_rows=4, regimes=Regimes(outgrown=20))
    encoder.join(0, [1, 2], EMBED, regime=1)
    encoder.join(1, [3], EMBED)
    batch = encoder.gather((1, 1), (0, 2)).batch
    assert batch.positions.tolist() == [0, 20, 21, 0]
    assert batch.prompts is None

    encoder = Encoder(least_rows=4, regimes=Regimes(prompt_over=1))
    encoder.join(0, [1, 2], EMBED, regime=2)
    encoder.join(1, [3], EMBED)
    batch = encoder.gather((1, 1), (0, 2)).batch
    assert batch.positions.tolist() == [0, 0, 1, 0]
    assert batch.prompts.tolist() == [0, 2, 2, 0]


def test_tokens_have_the_adapters_of_their_texts_and_padding_has_none():
    encoder = Encoder()
    encoder.join(0, [1, 2], EMBED, slot=3)
    encoder.join(1, [4], EMBED)
    assert encoder.gather((1, 1), (0, 2)).batch.adapters.slots == [0, 3, 3, 0]  # torch's products need four rows
    assert encoder.gather((1, 1)).batch.adapters is None


@pytest.mark.parametrize(("pooling", "read"), [("cls", [0, 2]), ("lasttoken", [1, 4])])
def test_of_the_last_layer_only_the_token_that_is_pooled_of_each_text_is_computed(pooling: Reduction, read: list[int]):
    encoder = Encoder(pooling=pooling)
    encoder.join(0, [7, 8, 9], EMBED)
    encoder.join(1, [5, 6], EMBED)
    gathered = encoder.gather((1, 2), (0, 3))

    sampled, (selection, _) = gathered.batch.sampled, gathered.selections
    assert sampled.tokens.tolist() == sampled.indices == read
    assert (sampled.padding, sampled.attention, sampled.adapters) == (0, None, None)
    assert selection.narrowed
    assert selection.of(states := torch.arange(2)) is states


def test_tokens_read_alone_are_padded_and_have_the_adapters_of_their_texts():
    encoder = Encoder(pooling="cls")
    encoder.join(0, [7, 8, 9], EMBED, slot=3)
    encoder.join(1, [5, 6], EMBED)
    sampled = encoder.gather((1, 2), (0, 3)).batch.sampled

    assert sampled.tokens.tolist() == sampled.indices == [0, 2, 2, 2]
    assert sampled.padding == 2
    assert sampled.adapters.slots == [0, 3, 3, 3]


def test_all_tokens_are_computed_if_another_readout_reads_or_fewer_would_be_padded_to_as_many():
    encoder = Encoder(pooling="cls")
    encoder.join(0, [7, 8, 9], EMBED)
    encoder.join(1, [5, 6], Pool("token_embed"))
    mixed = encoder.gather((0, 3), (1, 2))
    assert mixed.batch.sampled is None
    assert [each.of(torch.arange(5)).tolist() for each in mixed.selections] == [[0], [3, 4]]
    assert encoder.gather((1, 2)).batch.sampled is None
    assert encoder.gather((0, 3)).batch.sampled is not None

    for whole in (
        Encoder(pooling="cls", least_rows=4),
        Encoder(pooling="cls", skips_unsampled=False),
        Encoder(pooling="mean"),
    ):
        whole.join(0, [7, 8, 9], Pool("embed", skip=1))
        assert whole.gather((0, 3)).batch.sampled is None


@pytest.mark.parametrize("tokens", [[], [1] * 60, [-1], [1000]])
def test_an_invalid_text_is_refused(tokens: list[int]):
    with pytest.raises(ValueError, match=r"a sequence of|a token id outside"):
        Encoder().join(0, tokens, EMBED)
