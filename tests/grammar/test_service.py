"""The cache of compiled grammars, and what waits for the compiler. Runs with each engine."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import pytest

from infd.constraint import AfterThought, Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag, Thought
from infd.errors import GrammarFailed, TooSlow, Unsupported
from infd.grammar.outline import MOST_SCHEMA
from infd.grammar.service import LIMITS_S, MOST_OUTLINES, GrammarService, looks_cheap
from infd.offload import GRAMMAR_THREADS, Offload
from infd.telemetry.metrics import Metrics
from tests.grammar import engines, vocabularies
from tests.grammar.engines import Untried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.constraint import Constraint
    from infd.grammar.protocol import Limits, Vocabulary

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def offload() -> Iterator[Offload]:
    offload = Offload()
    yield offload
    offload.close()


def service(
    offload: Offload, metrics: Metrics, cache_bytes: int = 2**24, before: Callable[[Limits], None] = lambda limits: None
) -> GrammarService:
    """Return a service with a compiler. before: called with the limits of each compilation."""
    grammars = GrammarService(engines.config(cache_bytes=cache_bytes), offload, Untried(before), metrics)
    grammars.serve(lambda: vocabularies.byte_level(0))
    return grammars


async def test_a_constraint_before_the_compiler_is_built_waits_for_it(offload: Offload):
    reading = threading.Event()

    def read() -> Vocabulary:
        reading.wait(10)
        return vocabularies.byte_level(0)

    grammars = GrammarService(engines.config(), offload, Untried(), Metrics())
    grammars.serve(read)
    early = asyncio.ensure_future(grammars.compile(JsonObject()))
    await asyncio.sleep(0.02)
    assert not early.done()
    assert grammars.describe() == {}
    reading.set()

    assert (await early).matcher().validate([]) == 0
    assert engines.PRESENT.get() in str(grammars.describe()["chosen"])


async def test_many_requests_for_one_constraint_compile_it_once(offload: Offload):
    metrics = Metrics()
    grammars = service(offload, metrics)
    compiled = await asyncio.gather(*(grammars.compile(Regex("a+")) for _ in range(20)))
    again = await grammars.compile(Regex("a+"))

    assert len({id(each) for each in [*compiled, again]}) == 1
    assert (metrics.grammar_compiles, metrics.grammar_hits) == (1, 1)
    assert 0 < metrics.grammar_compile_s < 60


async def test_a_refusal_is_kept_and_each_request_gets_an_error_of_its_own(offload: Offload):
    metrics, errors = Metrics(), []
    grammars = service(offload, metrics)
    for _ in range(3):
        with pytest.raises(GrammarFailed, match=r"a \) is missing") as failed:
            await grammars.compile(Regex("("))
        errors.append(failed.value)

    assert len({id(error) for error in errors}) == 3
    assert {error.code for error in errors} == {"invalid_grammar"}
    assert metrics.grammar_compiles == 1


async def test_a_request_that_gives_up_does_not_end_the_compilation_for_others(offload: Offload):
    metrics = Metrics()
    grammars = service(offload, metrics)
    first, second = (asyncio.ensure_future(grammars.compile(Regex("b+"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first

    assert (await second).matcher()
    assert metrics.grammar_compiles == 1


async def test_a_constraint_that_no_request_waits_for_is_not_compiled(offload: Offload):
    metrics, blocked = Metrics(), threading.Event()
    grammars = service(offload, metrics)
    await grammars.compile(Regex("a"))
    blocker = offload.grammars(0, blocked.wait, 10)
    left = [asyncio.ensure_future(grammars.compile(Regex("b" * number))) for number in range(1, 50)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    returned = asyncio.ensure_future(grammars.compile(Regex("b")))
    await asyncio.sleep(0)
    blocked.set()
    await blocker

    assert (await returned).matcher()
    assert (await grammars.compile(Regex("c"))).matcher()  # the thread has passed all that was queued
    assert metrics.grammar_compiles == 3


async def test_a_request_that_arrives_when_its_constraint_was_just_dropped_gets_its_grammar(offload: Offload):
    grammars = service(offload, Metrics())
    await grammars.compile(Regex("a"))
    blocked, passed = threading.Event(), threading.Event()
    blocker = offload.grammars(0, blocked.wait, 10)
    left = asyncio.ensure_future(grammars.compile(Regex("b")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    passing = offload.grammars(0, passed.set)
    blocked.set()
    passed.wait(10)  # a thread has dropped the work, and the event loop has not run since

    assert (await grammars.compile(Regex("b"))).matcher()
    await asyncio.gather(blocker, passing)


# Takes the whole of any limit of time: llguidance's message of refusal takes time exponential in the patterns.
PATTERNS = [{"pattern": f".*{a}.*{b}"} for a in "abcdef" for b in "uvwxyz"]
ENDLESS = JsonSchema(json.dumps({"allOf": PATTERNS}))


async def test_costly_constraints_delay_no_cheap_one(offload: Offload):
    grammars, blocked = service(offload, Metrics()), threading.Event()
    costly = JsonSchema('{"allOf": [{"type": "string"}]}')
    assert not looks_cheap(costly)
    blockers = [offload.grammars(thread, blocked.wait, 60) for thread in range(1, GRAMMAR_THREADS)]
    waiting = asyncio.ensure_future(grammars.compile(costly))

    assert (await grammars.compile(JsonSchema('{"type": "string"}'))).matcher()
    assert not waiting.done()
    blocked.set()
    assert (await waiting).matcher()
    await asyncio.gather(*blockers)


@pytest.mark.parametrize(
    ("constraint", "cheap"),
    [
        (JsonObject(), True),
        (JsonSchema('{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}'), True),
        (Regex("[a-z]+@[a-z]+"), True),
        (Choice(("yes", "no")), True),
        (Regex("(a{1,9}){1,9}"), False),
        (ENDLESS, False),
        (JsonSchema('{"patternProperties": {"a": {}}}'), False),
        (JsonSchema('{"multipleOf": 7}'), False),
        (Choice(("a" * 5000,)), False),
        (Lark('start: "a"'), False),
        (Ebnf('root ::= "a"'), False),
        (StructuralTag("{}"), False),
        (AfterThought(Thought("<think>", "</think>"), Lark('start: "a"')), False),
    ],
)
def test_a_constraint_looks_cheap_if_it_is_short_and_combines_no_languages(constraint: Constraint, cheap: bool):
    assert looks_cheap(constraint) is cheap


async def test_a_constraint_that_exceeds_every_limit_passes_through_all_threads_and_is_refused(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
):
    tried: list[tuple[str, float]] = []

    def give_up(limits: Limits) -> None:
        tried.append((threading.current_thread().name, limits.seconds))
        raise TooSlow(f"more than {limits.seconds:g} s", code="grammar_too_large")

    metrics = Metrics()
    grammars = service(offload, metrics, before=give_up)
    for _ in range(2):
        with pytest.raises(GrammarFailed, match="more than 1 s") as failed:
            await grammars.compile(Regex("a+"))
    assert failed.value.code == "grammar_too_large"
    assert [limit for _, limit in tried] == [*LIMITS_S]
    assert len({thread for thread, _ in tried}) == GRAMMAR_THREADS
    assert metrics.grammar_compiles == 1


async def test_a_constraint_that_exceeds_a_limit_is_compiled_within_a_longer_one(offload: Offload):
    def take_longer(limits: Limits) -> None:
        if limits.seconds < 0.2:
            raise TooSlow("more", code="grammar_too_large")

    grammars = service(offload, Metrics(), before=take_longer)
    assert (await grammars.compile(Regex("a+"))).matcher()


async def test_an_exception_in_a_compilation_answers_every_request_that_waits_and_is_not_kept(offload: Offload):
    failures = [RuntimeError("out of luck")]

    def fail(limits: Limits) -> None:
        if failures:
            raise failures.pop()

    grammars = service(offload, Metrics(), before=fail)
    results = await asyncio.gather(*(grammars.compile(Regex("a+")) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in results] == ["out of luck"] * 3

    assert (await grammars.compile(Regex("a+"))).matcher()


async def test_work_that_cannot_be_queued_answers_its_requests(offload: Offload):
    def close(limits: Limits) -> None:
        offload.close()
        raise TooSlow("more", code="grammar_too_large")

    grammars = service(offload, Metrics(), before=close)
    with pytest.raises(RuntimeError, match="shutdown"):
        await grammars.compile(Regex("a+"))


async def test_a_closed_service_cancels_the_requests_that_wait(offload: Offload):
    grammars, begun, blocked = service(offload, Metrics()), threading.Event(), threading.Event()
    await grammars.compile(Regex("a"))

    def block() -> None:
        begun.set()
        blocked.wait(10)

    blocker = offload.grammars(0, block)
    waiting = asyncio.ensure_future(grammars.compile(Regex("b")))
    await asyncio.sleep(0)
    begun.wait(10)
    offload.close()
    blocked.set()
    await blocker

    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_cache_keeps_to_its_bytes_and_drops_the_least_used(offload: Offload):
    metrics = Metrics()
    grammars = service(offload, metrics, 2**20)
    kept = Regex("kept")
    await grammars.compile(kept)
    for number in range(100):
        await grammars.compile(Regex("a" * number))
        await grammars.compile(kept)
        assert 0 < metrics.grammar_cache_bytes <= 2**20

    assert metrics.grammar_compiles == 101
    await grammars.compile(Regex(""))
    assert metrics.grammar_compiles == 102


async def test_refusals_are_kept_within_a_part_of_the_cache_and_evict_no_grammar(offload: Offload):
    metrics = Metrics()
    grammars = service(offload, metrics, 2**20)
    await grammars.compile(Regex("kept"))
    refused = [Regex("(" + "a" * 4000 + str(number)) for number in range(60)]
    for each in refused:
        with pytest.raises(GrammarFailed):
            await grammars.compile(each)
    assert metrics.grammar_compiles == 61
    assert metrics.grammar_cache_bytes < 2**19
    await grammars.compile(Regex("kept"))
    with pytest.raises(GrammarFailed):
        await grammars.compile(refused[-1])
    assert (metrics.grammar_compiles, metrics.grammar_hits) == (61, 2)
    with pytest.raises(GrammarFailed):
        await grammars.compile(refused[0])
    assert metrics.grammar_compiles == 62


async def test_a_grammar_larger_than_the_cache_is_used_and_not_kept(offload: Offload):
    metrics = Metrics()
    grammars = service(offload, metrics, 2**20)
    draw = random.Random(0)
    large = Choice(tuple(f"{draw.getrandbits(160):040x}" for _ in range(1300)))
    assert (await grammars.compile(large)).size > 2**20
    assert metrics.grammar_cache_bytes == 0


async def test_an_evicted_grammar_still_serves_its_choices(offload: Offload):
    grammars = service(offload, Metrics())
    grammar = await grammars.compile(Regex("a+"))
    matcher = grammar.matcher()
    del grammar, grammars

    assert not matcher.accepting


async def test_a_schemas_outline_is_kept_and_other_constraints_have_none(offload: Offload):
    grammars, schema = service(offload, Metrics()), '{"type": "object", "properties": {"a": {"type": "null"}}}'
    await grammars.compile(JsonSchema(schema))
    outline = grammars.outline(JsonSchema(schema))
    assert outline is not None
    assert outline.root.names == (b'"a"',)
    assert grammars.outline(JsonSchema(schema)) is outline
    compact = grammars.outline(JsonSchema(schema, whitespace=False))
    assert (compact is not None and compact.whitespace, outline.whitespace) == (False, True)
    assert [grammars.outline(each) for each in (None, JsonObject(), JsonSchema(" " * MOST_SCHEMA + "{}"))] == [None] * 3
    for number in range(MOST_OUTLINES):
        assert grammars.outline(JsonSchema(json.dumps({"title": number}))) is not None
    assert grammars.outline(JsonSchema(schema)) is not outline, "the least recently used are dropped"


async def test_without_texts_of_tokens_constraints_are_refused(offload: Offload):
    grammars = GrammarService(engines.config(), offload, Untried(), Metrics())
    grammars.serve(lambda: None)
    with pytest.raises(Unsupported, match="tokenizer"):
        await grammars.compile(JsonObject())
    assert grammars.describe()["chosen"] == "none"


async def test_without_a_library_constraints_are_refused_with_the_reason(
    offload: Offload, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    grammars = service(offload, Metrics())
    with pytest.raises(Unsupported, match=f"{engines.PRESENT.get()} is not installed"):
        await grammars.compile(JsonObject())
    assert "not installed" in str(grammars.describe()["refused"])


def test_constraints_are_keys():
    assert len({JsonObject(), JsonObject(), JsonObject(whitespace=False), Choice(("a",)), Regex("a")}) == 4
    assert msgspec.json.encode(Choice(("a",)))
