from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from infd.kernels.reference.drawing.draw import Draw
from infd.runner.batch import gather
from infd.runner.readouts.sampling import Sampling
from infd.runner.readouts.scoring import Scoring
from infd.runner.sampler import Sampler
from infd.scheduler.layout import CacheLayout, PageGroup
from tests.runner.driving import instance, join, make_rows, span

MODEL = SimpleNamespace(least_rows=4, skips_unsampled=True)
NATIVE = SimpleNamespace(least_rows=1, skips_unsampled=True)

SIZES = (4, 2)
LAYOUT = CacheLayout(
    (PageGroup(layers=(0,), page_tokens=4), PageGroup(layers=(1,), page_tokens=2, window=5)),
)


@st.composite
def sequences(draw):
    """Rows with tokens, scattered pages, and a span somewhere in each."""
    count = draw(st.integers(1, 5))
    ids = draw(st.permutations(range(1, 200)))
    told = []
    for row in draw(st.permutations(range(5)))[:count]:
        length = draw(st.integers(1, 30))
        tokens = draw(st.lists(st.integers(0, 100), min_size=length, max_size=length))
        tables = [[ids.pop() for _ in range(-(-length // size))] for size in SIZES]
        start = draw(st.integers(0, length - 1))
        count = draw(st.integers(1, length - start))
        scores = draw(st.integers(0, min(count, length - start - 1)))
        told.append((row, tokens, tables, start, count, draw(st.booleans()), scores))
    return told


def build(told):
    rows = make_rows(rows=5, page_tokens=SIZES)
    rows.stage([join(row, tokens, tables) for row, tokens, tables, *_ in told], [])
    spans = [
        span(row, start, count, samples=samples, scores=scores) for row, _, _, start, count, samples, scores in told
    ]
    return gathered_of(spans, rows)


def gathered_of(spans, rows, layout=LAYOUT, model=MODEL):
    parts = instance(model, layout, rows)
    return gather(spans, parts, (Scoring(parts), Sampling(model, Sampler(rows, Draw()))))


@settings(deadline=None, max_examples=60)
@given(sequences())
def test_a_batch_matches_its_spans_token_by_token(told):
    gathered = build(told)
    tokens, positions, slots = [], [], ([], [])
    for _, known, tables, start, count, *_ in told:
        for position in range(start, start + count):
            tokens.append(known[position])
            positions.append(position)
            for i, size in enumerate(SIZES):
                slots[i].append(tables[i][position // size] * size + position % size)
    total = len(tokens)

    batch = gathered.batch
    assert batch.tokens[:total].tolist() == tokens
    assert batch.positions[:total].tolist() == positions
    for i, size in enumerate(SIZES):
        attention = batch.attention[i].batch
        assert attention.slots[:total].tolist() == slots[i]
        assert attention.starts == attention.start.tolist() == [start for _, _, _, start, *_ in told]
        assert attention.counts == [count for *_, count, _, _ in told]
        for row, (_, _, tables, start, count, *_) in zip(attention.table.tolist(), told, strict=True):
            needed = -(-(start + count) // size)
            assert row[:needed] == tables[i][:needed]

    sampling = [(row, start + count) for row, _, _, start, count, samples, _ in told if samples]
    scoring, sampled = gathered.selections
    assert (sampled is None) == (not sampling)
    if sampled is not None:
        places = list(zip(sampled.rows.tolist(), sampled.positions.tolist(), strict=True))
        assert places[: len(sampling)] == [(row, end - 1) for row, end in sampling]
        assert batch.positions[sampled.index].tolist()[: len(sampling)] == [end - 1 for _, end in sampling]

    scored = [(known, p) for _, known, _, start, _, _, scores in told for p in range(start, start + scores)]
    assert (scoring is None) == (not scored)
    if scoring is not None:
        assert batch.positions[scoring.index].tolist() == scoring.positions.tolist() == [p for _, p in scored]
        assert batch.tokens[scoring.index].tolist() == [known[p] for known, p in scored]
        assert scoring.rows.tolist() == [row for row, *_, scores in told for _ in range(scores)]


@settings(deadline=None, max_examples=60)
@given(sequences())
def test_the_last_layer_goes_on_with_one_token_of_each_span_that_samples(told):
    gathered = build(told)
    every = [(tables, start + count - 1, samples) for _, _, tables, start, count, samples, _ in told]
    ends = [(tables, end) for tables, end, samples in every if samples] or [every[-1][:2]]
    padding = 4 - len(ends)
    ends += ends[-1:] * padding
    wanted, sampled = gathered.batch.sampled, gathered.selections[1]
    if sampled is not None:
        assert gathered.batch.positions[sampled.index].tolist() == [end for _, end in ends]
        assert sampled.narrowed == (wanted is not None)

    total = sum(count for *_, count, _, _ in told)
    if any(scores for *_, scores in told) or len(ends) == max(4, total):
        assert wanted is None
        return
    assert gathered.batch.positions[wanted.tokens].tolist() == [end for _, end in ends]
    assert wanted.padding == max(0, padding)
    attention = wanted.attention.batch
    assert (attention.window, attention.page_tokens) == (5, 2)  # of the last layer's group
    assert attention.counts == [1] * len(ends)
    assert attention.offsets == list(range(len(ends) + 1))
    assert attention.starts == attention.start.tolist() == [end for _, end in ends]
    for row, (tables, end) in zip(attention.table.tolist(), ends, strict=True):
        assert row[: end // 2 + 1] == tables[1][: end // 2 + 1]


def test_attention_of_sampled_tokens_begins_at_the_devices_lengths():
    rows = make_rows(page_tokens=SIZES)
    rows.stage([join(0, [7, 8, 9], [[1, 2], [3, 4, 5]]), join(1, [5, 6], [[6], [7]])], [])
    spans = [span(0, 5, 1), span(1, 0, 2)]
    gathered = gathered_of(spans, rows, model=NATIVE)
    attention = gathered.batch.sampled.attention.batch
    assert attention.starts == [5, 1]
    assert attention.start.tolist() == [2, 1]


def test_a_model_that_cannot_select_tokens_gets_no_selection():
    rows = make_rows(page_tokens=SIZES)
    rows.stage([join(0, [7, 8, 9], [[1, 2], [3, 4]])], [])
    model = SimpleNamespace(least_rows=1, skips_unsampled=False)
    gathered = gathered_of([span(0, 0, 3)], rows, model=model)
    assert gathered.batch.sampled is None
    assert gathered.selections[1].index.tolist() == [2]


@settings(deadline=None, max_examples=60)
@given(sequences())
def test_a_small_step_is_padded_to_four_rows_that_write_to_the_scratch_page(told):
    gathered = build(told)
    total = sum(count for *_, count, _, _ in told)
    batch = gathered.batch
    assert len(batch.tokens) == len(batch.positions) == max(4, total)
    for i, size in enumerate(SIZES):
        slots = batch.attention[i].batch.slots
        assert len(slots) == max(4, total)
        assert (slots[total:] < size).all()
    if (sampled := gathered.selections[1]) is not None:
        assert len(sampled.index) >= 4


def test_a_model_whose_products_do_not_depend_on_the_number_of_rows_gets_no_padding():
    rows = make_rows(page_tokens=(4,))
    rows.stage([join(0, [7, 8, 9], [[1, 2]])], [])
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=4),))

    gathered = gathered_of([span(0, 2, 1)], rows, layout, NATIVE)
    assert gathered.batch.tokens.tolist() == [9]
    assert gathered.selections[1].index.tolist() == [0]


def test_a_span_begins_where_the_device_says_when_the_host_runs_ahead():
    rows = make_rows(page_tokens=(4,))
    rows.stage([join(0, [7, 8, 9], [[1, 2]])], [])
    layout = CacheLayout((PageGroup(layers=(0,), page_tokens=4),))

    gathered = gathered_of([span(0, 5, 1)], rows, layout)
    assert gathered.batch.attention[0].batch.starts == [5]  # the bound
    assert gathered.batch.attention[0].batch.start.tolist() == [2]  # the truth
    assert gathered.batch.tokens[0] == 9
    assert gathered.selections[1].positions.tolist() == [2] * 4
