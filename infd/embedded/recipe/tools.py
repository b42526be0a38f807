"""Generate tool use: choice of a tool, arguments, answers without a call, and reports of results.

A conversation offers one to five tools in random order: tools of tools.toml and
invented tools. The last answer is one call, two calls, a sentence about a
result, or text without a call, because no tool is needed or no tool fits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from infd.embedded.recipe import arithmetic
from infd.embedded.recipe.catalogue import Tool, Use, listed_tools, signature, spelled, use, varied
from infd.embedded.recipe.conversation import Conversation, Expect, Pool
from infd.embedded.recipe.invented import invent
from infd.embedded.recipe.slots import fill, listed, opening

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

THINKING_SHARE: Final = 0.3
INVENTED_SHARE: Final = 0.45
CANNOT: Final = "I cannot do that: none of the functions I have does it."
UNKNOWN: Final = "I don't know."
ANSWERING: Final = frozenset({"math", "search", "library", "movies"})


class Offer:
    """The tools that one conversation offers, with the client's spelling of their names."""

    def __init__(self, rng: Random, tools: Sequence[Tool]) -> None:
        self.tools = rng.sample(tools, len(tools))
        self.names = {tool.name: spelled(rng, tool) for tool in tools}
        self.signatures = [signature(rng, tool, self.names[tool.name]) for tool in self.tools]

    def call(self, use: Use) -> dict[str, Any]:
        return {"name": self.names[use.tool.name], "arguments": use.arguments}


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation that offers tools."""
    (make,) = rng.choices([make for make, _ in _COURSES], [weight for _, weight in _COURSES])
    return make(rng, pool, thinking=rng.random() < THINKING_SHARE)


def _choose(rng: Random, pool: Pool, least: int) -> list[Tool]:
    """Draw at least `least` tools to offer. Most conversations call the first of these tools."""
    count = max(least, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5)))
    if rng.random() < INVENTED_SHARE:
        tools = invent(rng, pool, rng.randint(1, count))
        tools += rng.sample(listed_tools(pool), count - len(tools))
    else:
        strange = rng.choice((0, 0, 0, 1, 2)) if count > least else 0
        strange = min(strange, count - least)
        tools = rng.sample(listed_tools(pool), count - strange) + invent(rng, pool, strange)
    return list({tool.name: tool for tool in tools}.values())


def _message(calls: Sequence[dict[str, Any]], rng: Random) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{rng.getrandbits(32):08x}", "type": "function", "function": call} for call in calls
        ],
    }


def _why(calls: Sequence[dict[str, Any]], uses: Sequence[Use]) -> str:
    lines = []
    for call, one in zip(calls, uses, strict=True):
        values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in one.arguments.items())
        lines.append(f"{call['name']} fits: {one.tool.about}. {values}")
    return "\n".join(lines)


def _finish(
    messages: list[dict[str, Any]],
    answer: dict[str, Any],
    thought: str,
    offer: Offer,
    expect: Expect,
    *,
    thinking: bool,
) -> Conversation:
    if thinking:
        answer = {**answer, "reasoning_content": thought}
    return Conversation(
        kind="tools", messages=[*messages, answer], tools=offer.signatures, thinking=thinking, expect=expect
    )


def _request(rng: Random, pool: Pool, uses: Sequence[Use]) -> dict[str, Any]:
    if len(uses) == 1:
        return {"role": "user", "content": varied(rng, uses[0].question, pool)}
    one, two = (one.question for one in uses)
    joint = listed(rng, "joints", pool)
    # After the words that join two requests, the second begins in lower case, unless its first word is an argument.
    first = two.split()[0].rstrip(",:;.?")
    then = two if first in str(uses[1].arguments.values()) else two[0].lower() + two[1:]
    return {"role": "user", "content": joint.format(one=one, two=two, then=then if not two.startswith("I ") else two)}


def _calling(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    tools = _choose(rng, pool, 1)
    offer, uses = Offer(rng, tools), [use(rng, tools[0], pool)]
    return _called(rng, pool, offer, uses, opening(rng, pool), thinking=thinking)


def _calling_twice(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    offer, uses = _two(rng, pool)
    return _called(rng, pool, offer, uses, opening(rng, pool), thinking=thinking)


def _called(
    rng: Random, pool: Pool, offer: Offer, uses: Sequence[Use], before: list[dict[str, Any]], *, thinking: bool
) -> Conversation:
    calls = [offer.call(one) for one in uses]
    messages = [*before, _request(rng, pool, uses)]
    return _finish(messages, _message(calls, rng), _why(calls, uses), offer, Expect(calls=calls), thinking=thinking)


def _two(rng: Random, pool: Pool) -> tuple[Offer, list[Use]]:
    tools = _choose(rng, pool, 2)
    wanted = [tools[0], tools[0] if rng.random() < 0.3 or len(tools) == 1 else tools[1]]
    uses = [use(rng, tool, pool) for tool in wanted]
    while uses[0].arguments == uses[1].arguments and wanted[0] is wanted[1]:
        uses[1] = use(rng, wanted[1], pool)
    return Offer(rng, tools), uses


def _exchange(
    rng: Random, pool: Pool, offer: Offer, uses: Sequence[Use]
) -> tuple[list[dict[str, Any]], str, str, Expect]:
    """Return (messages, reasoning, answer, Expect).

    The messages are a request, the calls that it needs, and their results. The answer reports the results.
    """
    answer = _message([offer.call(one) for one in uses], rng)
    messages = [_request(rng, pool, uses), answer]
    sentences, thoughts, facts = [], [], []
    for call, one in zip(answer["tool_calls"], uses, strict=True):
        if rng.random() < 0.07:
            reason = listed(rng, "failures", pool)
            content = rng.choice((json.dumps({"error": reason}), f"error: {reason}"))
            sentences.append(f"That did not work: {reason}.")
            thoughts.append(f"{call['function']['name']} failed: {reason}.")
            facts.append(reason)
        else:
            content = _result(rng, one.result)
            sentences.append(one.sentence)
            given = ", ".join(f"{field} = {json.dumps(value)}" for field, value in one.result.items())
            thoughts.append(f"{call['function']['name']} answered: {given or 'done'}.")
            facts += one.facts
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
        )
    expect = Expect(contains=[[fact] for fact in facts], calls=[])
    return messages, "\n".join(thoughts), " ".join(sentences), expect


def _result(rng: Random, result: Mapping[str, Any]) -> str:
    """Encode a result as tools do: usually as JSON, with fields in random order, sometimes with an extra field."""
    if not result:
        return rng.choice(('{"status": "ok"}', '{"ok": true}', '{"success": true}', "ok", "done", '{"result": "done"}'))
    fields = rng.sample(list(result.items()), len(result))
    if rng.random() < 0.15:
        return rng.choice((", ", "\n")).join(f"{field}: {value}" for field, value in fields)
    if rng.random() < 0.2:
        fields.append(rng.choice((("ok", True), ("cached", False), ("took_ms", rng.randint(1, 400)))))
    return json.dumps(dict(fields), ensure_ascii=False)


def _answering(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    if rng.random() < 0.25:
        offer, uses = _two(rng, pool)
    else:
        tools = _choose(rng, pool, 1)
        offer, uses = Offer(rng, tools), [use(rng, tools[0], pool)]
    messages, thought, sentence, expect = _exchange(rng, pool, offer, uses)
    answer = {"role": "assistant", "content": sentence}
    return _finish([*opening(rng, pool), *messages], answer, thought, offer, expect, thinking=thinking)


def _calling_again(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    """Draw a conversation with a second request after a completed first request."""
    tools = _choose(rng, pool, 2)
    offer = Offer(rng, tools)
    messages, _, sentence, _ = _exchange(rng, pool, offer, [use(rng, tools[0], pool)])
    before = [*messages, {"role": "assistant", "content": sentence}]
    return _called(rng, pool, offer, [use(rng, rng.choice(tools), pool)], before, thinking=thinking)


def with_unneeded_tools(rng: Random, pool: Pool, plain: Conversation) -> Conversation:
    """Return the conversation `plain`, with an offer of tools that no answer in `plain` needs."""
    # Tools of the domains in ANSWERING are not offered, because these tools could answer the question.
    tools = [tool for tool in _choose(rng, pool, 1) if tool.domain not in ANSWERING]
    *messages, answer = plain.messages
    thought = f"None of the functions is needed. {answer.get('reasoning_content', '')}".rstrip()
    expect = replace(plain.expect, calls=[])
    return _finish(
        messages, answer, thought, Offer(rng, tools or invent(rng, pool, 1)), expect, thinking=plain.thinking
    )


def _chatting(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    """Draw a conversation that offers tools but needs no tool."""
    chance = rng.random()
    if chance < 0.35:
        return with_unneeded_tools(rng, pool, arithmetic.draw(rng, pool))
    if chance < 0.6:
        question, reply, needle = listed(rng, "greetings", pool), "Hello! What can I do for you?", "hello"
    elif chance < 0.75:
        question, reply, needle = listed(rng, "goodbyes", pool), "You are welcome!", "welcome"
    else:
        template = listed(rng, "unknowable", pool)
        question = template.format(**{kind: fill(rng, kind, pool) for kind in ("title", "full_name", "city")})
        reply, needle = UNKNOWN, "don't know"
    messages = [*opening(rng, pool), {"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    plain = Conversation(kind="tools", messages=messages, thinking=thinking, expect=Expect(contains=[[needle]]))
    return with_unneeded_tools(rng, pool, plain)


def _declining(rng: Random, pool: Pool, *, thinking: bool) -> Conversation:
    """Draw a request that none of the offered tools fits."""
    wanted = rng.choice(listed_tools(pool)) if rng.random() < 0.7 else invent(rng, pool, 1)[0]
    tools = [tool for tool in _choose(rng, pool, 1) if tool.domain not in {wanted.domain, "search"}]
    offer = Offer(rng, tools or invent(rng, pool, 1))
    messages = [*opening(rng, pool), _request(rng, pool, [use(rng, wanted, pool)])]
    return _finish(
        messages,
        {"role": "assistant", "content": CANNOT},
        "None of the functions does this.",
        offer,
        Expect(contains=[["cannot"]], calls=[]),
        thinking=thinking,
    )


_COURSES: Final[tuple[tuple[Callable[..., Conversation], float], ...]] = (
    (_calling, 46),
    (_calling_twice, 10),
    (_answering, 22),
    (_calling_again, 7),
    (_chatting, 8),
    (_declining, 7),
)
