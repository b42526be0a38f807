"""A hostile template ends at a limit before it takes much time or memory, and cannot reach Python."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from itertools import count

import pytest

from infd.errors import InvalidRequest, TooCostly
from infd.text.chat import MAX_SOURCE_CHARACTERS, ChatTemplate
from infd.text.fuel import BRIEF, Limits
from infd.text.sandbox import Sandbox
from tests.text.templates import CHATML, CONVERSATIONS, TEMPLATES

HELLO = [{"role": "user", "content": "Hello " * 100}]
SMALL = Limits(output_characters=100_000, fuel=1_000_000)
SMILES = "\U0001f642" * 100
DOUBLED = "{% set ns = namespace(a='x', l=[1]) %}{% for i in range(60) %}"

# Two equal structures of 45 levels, each of which holds the next one twice: walking one takes years.
TWINS = (
    "{% set ns = namespace(a=[1], b=[1], t=(1, 1), l=[]) %}"
    "{% for i in range(45) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
LONG = "{% set ns = namespace(l=[]) %}{% set t = 'xy' * 200000 %}"

COMPARING = {
    "equality": TWINS + "{{ ns.a == ns.b }}",
    "inequality": TWINS + "{{ ns.a != ns.b }}",
    "order": TWINS + "{{ ns.a < ns.b }}{{ ns.a >= ns.b }}",
    "membership": TWINS + "{{ ns.a in [ns.b] }}",
    "membership of a mapping's values": TWINS + "{{ ns.a in {'x': ns.b}.values() }}",
    "a key": TWINS + "{{ {'a': 1}[ns.t] }}",
    "a key that is asked for": TWINS + "{{ {'a': 1}.get(ns.t) }}",
    "a key that is looked for": TWINS + "{{ ns.t in {'a': 1} }}",
    "a key that is made": TWINS + "{{ {ns.t: 1} }}",
    "keys that are made": TWINS + "{{ dict([(ns.t, 1)]) }}",
    "a difference of sets": TWINS + "{{ {'a': 1}.keys() - [ns.t] }}",
    "sorting": TWINS + "{{ [ns.a, ns.b] | sort | length }}",
    "sorting by an attribute": TWINS + "{{ [{'a': ns.a}, {'a': ns.b}] | sort(attribute='a') | length }}",
    "the unique ones": TWINS + "{{ [ns.t, (ns.t, ns.t)] | unique | list | length }}",
    "groups": TWINS + "{{ [{'a': ns.a}, {'a': ns.b}] | groupby('a') | length }}",
    "the least": TWINS + "{{ [ns.a, ns.b] | min | length }}",
    "the largest": TWINS + "{{ [ns.a, ns.b] | max | length }}",
    "sorted pairs": TWINS + "{{ {'a': ns.a, 'A': ns.b} | dictsort(by='value') | length }}",
    "a test": TWINS + "{{ ns.a is eq(ns.b) }}",
    "a test of membership": TWINS + "{{ ns.a is in [ns.b] }}",
    "selecting": TWINS + "{{ [ns.a] | select('eq', ns.b) | list | length }}",
    "rejecting": TWINS + "{{ [ns.a] | reject('in', [ns.b]) | list | length }}",
    "selecting by an attribute": TWINS + "{{ [{'a': ns.a}] | selectattr('a', '==', ns.b) | list | length }}",
    "counting": TWINS + "{{ [ns.a].count(ns.b) }}",
    "finding": TWINS + "{{ [ns.a].index(ns.b) }}",
    "what changed": TWINS + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "a mapping's equality": TWINS + "{{ {'a': ns.a} == {'a': ns.b} }}",
    "printing what a filter made": TWINS + "{{ [ns.a] | map('list') | join }}",
    "complaining": TWINS + "{{ raise_exception(ns.a) }}",
    "printing one by name": TWINS + "{{ '%(a)s' % {'a': ns.a} }}",
    "searching": LONG + "{% for i in range(9999) %}{% if 'z' in t %}{% endif %}{% endfor %}",
    "searching backwards": LONG + "{{ t.rfind('y' + 'x' * 100000) }}",
    "splitting backwards": LONG + "{{ t.rsplit('y' + 'x' * 100000) | length }}",
    "stripping": LONG + "{{ t.strip('xy' * 100000) }}",
    "splitting": LONG + "{% for i in range(9) %}{% set ns.l = ns.l + [t.split('x')] %}{% endfor %}",
    "letters": LONG + "{% for i in range(9) %}{% set ns.l = ns.l + [t | list] %}{% endfor %}",
    "parts of a text": LONG + "{% for i in range(99) %}{% set ns.l = ns.l + [t[1:]] %}{% endfor %}",
    "lists of lists": "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}"
    "{% set ns.l = [" + "ns.l, " * 99 + "] %}{% endfor %}",
    "captured text": LONG + "{% macro m() %}{% set x %}" + "x" * 3000 + "{% endset %}"
    "{% set ns.l = ns.l + [x] %}{% endmacro %}{% for i in range(9999) %}{{ m() }}{% endfor %}",
    "deep JSON, indented": "{% set ns = namespace(l=1) %}{% for i in range(400) %}{% set ns.l = [ns.l, 1] %}"
    "{% endfor %}{{ ns.l | tojson(indent=16) }}",
    "filters of filters": "{% set ns = namespace(l=range(9999)) %}{% for i in range(99) %}"
    "{% set ns.l = ns.l | map('abs') %}{% endfor %}{{ ns.l | list | length }}",
    "a body without a loop": "{% macro m() %}" + "{% if messages.y %}{% endif %}" * 999 + "{% endmacro %}"
    "{% for i in range(9999) %}{{ m() }}{% endfor %}",
    "dates": "{{ strftime_now('%c' * 99999) }}",
}
HUNGRY = {
    "a loop in a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a text": "{% set t = 'x' * 9000 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "a filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in range(999) recursive %}"
    "{% if loop.depth < 4 %}{% set x = loop(range(999)) %}{% endif %}{% endfor %}",
    "a block in a loop": "{% for i in range(99) %}{% block b scoped %}"
    "{% for j in range(9999) %}{% endfor %}{% endblock %}{% endfor %}",
    "literal text in a loop": "{% set x %}{% for i in range(9999) %}" + "x" * 2000 + "{% endfor %}{% endset %}",
    "adding": DOUBLED + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "joining": DOUBLED + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "a filter's join": DOUBLED + "{% set ns.a = [ns.a, ns.a] | join %}{% endfor %}",
    "a method's join": DOUBLED + "{% set ns.a = ns.a.join('abc') %}{% endfor %}",
    "replacing": DOUBLED + "{% set ns.a = ns.a.replace('x', 'xx') %}{% endfor %}",
    "a filter's replace": DOUBLED + "{% set ns.a = ns.a | replace('x', 'xx') %}{% endfor %}",
    "formatting": DOUBLED + "{% set ns.a = '%s%s' % (ns.a, ns.a) %}{% endfor %}",
    "the format method": DOUBLED + "{% set ns.a = '{0}{0}'.format(ns.a) %}{% endfor %}",
    "a captured block": "{% set a = 'x' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60 + "done",
    "a macro": "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set a = 'x' %}" + "{% set a = m(a) %}" * 60,
    "growing lists": DOUBLED + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "a structure that holds itself twice": DOUBLED + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "the same, as JSON": DOUBLED + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "the same, as text": DOUBLED + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{% set x = ns.l | string %}",
    "the same, joined": DOUBLED + "{% set ns.l = (ns.l, ns.l) %}{% endfor %}{% set x = ns.l ~ '' %}",
    "the same, formatted": DOUBLED + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{% set x = '%s' % ns.l %}",
    "the same, by its values": DOUBLED + "{% set ns.l = {'a': ns.l, 'b': ns.l}.values() %}{% endfor %}{{ ns.l }}",
    "repeating": "{{ 'x' * 10**10 }}",
    "repeating from the left": "{{ 10**10 * 'x' }}",
    "repeating a list": "{{ [1] * 10**10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a product": "{% set ns = namespace(a=9**999) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "padding": "{{ 'x' | center(10000000000) }}",
    "a method's padding": "{{ 'x'.ljust(10000000000) }}{{ 'x'.zfill(10000000000) }}",
    "indenting": "{{ ('\n' * 9000) | indent(10000) }}",
    "indented JSON": "{{ {'a': 1} | tojson(indent=1000000000) }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a width from the values": "{{ '%*d' % (9999999999, 1) }}",
    "the format filter": "{{ '%9999999999d' | format(1) }}",
    "a wide field of the format method": "{{ '{:9999999999}'.format(1) }}",
    "a width from the format method's values": "{{ '{:{}}'.format(1, 9999999999) }}",
    "translating": "{{ ('x' * 9000).translate({120: 'x' * 9000}) }}",
    "batches": "{{ [1] | batch(10000000000, 'x') | list }}",
    "much output": "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}",
    "a long range": "{{ range(10**9) | list }}",
    "plain words": "{{ lipsum(n=10000000) }}",
    "mapped filters": "{{ range(99999) | map('string') | map('center', 9999) | list | length }}",
}


# The value, or a temporary, would have hundreds of megabytes.
LARGE = {
    "a text joined by a text": "{{ ('x' * 400000) | join('" + "y" * 1000 + "') }}",
    "a text joined by a structure": "{{ ('x' * 1000) | join(messages) }}",
    "a list joined by a list": "{{ (['x'] * 2000) | join([t]) }}",
    "characters joined": "{{ ('" + SMILES + "' * 60000) | join }}",
    "a method's characters": "{{ ('y' * 1000).join('x' * 400000) }}",
    "nothing, padded": "{{ ''.center(300000000, '" + SMILES[0] + "') }}",
    "indented by a text": "{{ ('\n' * 400000) | indent('" + "x" * 1000 + "', true, true) }}",
    "fields of a width": "{{ ('%(a)999d' * 400000) % {'a': 1} }}",
    "fields that name a text": "{{ ('{0}' * 400000).format('x' * 1000) }}",
    "numbers replaced": "{{ ('1' * 400000) | replace(1, [bos_token] * 100) }}",
    "JSON between separators": "{{ ([''] * 400000) | tojson(separators=['" + "x" * 1000 + "', '']) }}",
    "words": "{{ ('" + SMILES.replace(SMILES[:2], SMILES[0] + " ") + "' * 60000) | title }}",
    "what a macro writes": "{% macro m() %}{% for i in range(400) %}{{ t }}{% endfor %}"
    + SMILES
    + "{% endmacro %}{{ m() }}",
    "texts side by side": "{{ " + "t ~ " * 400 + "'" + SMILES + "' }}",
    "what a structure prints": "{{ ([t ~ '" + SMILES + "'] * 400) | string }}",
    "numbers": "{% set n = 9 ** 600 %}{{ ([n] * 400000) | string }}",
    "quotes": "{{ ('\"' * 8000000 ~ '" + SMILES + "') | e | length }}",
    "quotes beside markup": "{{ ('\"' * 8000000 ~ '" + SMILES + "') + (' ' | safe) }}",
    "quotes in markup": "{{ (' ' | safe).join(['\"' * 8000000 ~ '" + SMILES + "']) | length }}",
    "bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "keys": "{{ [dict([(t, 1)]).keys() - []] * 999 }}",
}
LENGTHY = {
    "what a filter rejects": "{% set l = range(99999) | list %}{% for i in range(99) %}"
    "{% set x = l | reject('number') | list %}{% endfor %}",
    "a path": "{{ (['x'] * 99999) | sort(attribute='" + ".".join("0" * 300) + "') | length }}",
    "sums": "{% set l = range(99999) | list %}{% for i in range(9999) %}{% set x = l | sum %}{% endfor %}",
    "marks": "{{ (('<!---->' * 99999) | safe).striptags() }}",
    "long numbers": "{% set x = (('f' * 400000) | int(0, 16)) // (('e' * 200000) | int(0, 16)) %}",
    "empty texts": "{% set l = [''] * 999 * 999 %}{% for i in range(9) %}{% set x = l | join %}{% endfor %}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_value_is_paid_for_before_it_is_made(source: str):
    messages = [{"role": "user", "content": "x" * 300_000}]
    template = ChatTemplate({"default": "{% set t = messages[0].content %}" + source})
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            template.render(messages)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**27


@pytest.mark.parametrize("source", LENGTHY.values(), ids=LENGTHY)
def test_a_long_computation_runs_out_of_fuel(source: str):
    template = ChatTemplate({"default": source}, limits=Limits(fuel=Limits().fuel // 4, seconds=1e9))

    with pytest.raises(InvalidRequest):
        template.render(HELLO)


@pytest.mark.parametrize("source", (HUNGRY | COMPARING).values(), ids=HUNGRY | COMPARING)
def test_a_template_that_allocates_much_is_refused(source: str):
    with pytest.raises(InvalidRequest):
        ChatTemplate({"default": source}, limits=SMALL).render(HELLO)


@pytest.mark.parametrize("source", [source for name, source in COMPARING.items() if "made" not in name])
def test_fuel_runs_out_before_time_or_memory(source: str):
    with pytest.raises(TooCostly):
        ChatTemplate({"default": source}, limits=SMALL).render(HELLO)


def test_a_deeply_nested_structure_is_bounded_too():
    source = "{% set ns = namespace(t=(1,)) %}{% for i in range(9999) %}{% set ns.t = (ns.t,) %}{% endfor %}"
    for use in ("{{ {'a': 1}[ns.t] }}", "{{ ns.t == (ns.t,) }}", "{{ [ns.t] | unique | list }}", "{{ ns.t }}"):
        with pytest.raises(InvalidRequest, match="recursion"):
            ChatTemplate({"default": source + use}).render(HELLO)


REACHING = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0]['__class__'] }}{{ raise_exception.__globals__ }}",
    "{{ ('%s' | attr('__class__')).x }}{{ (messages | attr('__class__')).x }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% for x in messages | map(attribute='__class__') %}{{ x.x }}{% endfor %}",
    "{{ namespace.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", REACHING)
def test_a_template_reaches_no_object_of_python(source: str):
    template = ChatTemplate({"default": source})

    with contextlib.suppress(InvalidRequest):
        assert template.render(HELLO) == ""


def test_a_template_may_change_the_lists_that_it_wrote_and_no_other():
    def text(source: str) -> str:
        return ChatTemplate({"default": source}).render(HELLO)

    own = "{% set ns = namespace(l=[]) %}{% for x in 'abc' %}{% set _ = ns.l.append(x) %}{% endfor %}"
    assert text(own + "{{ ns.l }}{{ ns.l.pop(0) }}{{ ns.l.insert(1, 7) }}{{ ns.l | tojson }}") == (
        "['a', 'b', 'c']aNone[\"b\", 7, \"c\"]"
    )
    for refused in ("messages.append(1)", "('a,b'.split(',')).append(1)", "ns.l.clear()", "ns.l.extend([1])"):
        with pytest.raises(InvalidRequest, match="unsafe"):
            text(own + "{{ " + refused + " }}")
    for itself in ("ns.l", "[ns.l]", "{'a': ({'b': ns.l},)}"):
        with pytest.raises(InvalidRequest, match="itself"):
            text(own + "{{ ns.l.append(" + itself + ") }}")


@pytest.mark.parametrize("change", ["append(x)", "insert(0, x)", "append([x, x])"])
def test_a_list_that_grows_while_it_is_read_runs_out_of_fuel(change: str):
    source = "{% set ns = namespace(l=[1]) %}{% for x in ns.l %}{% set _ = ns.l." + change + " %}{% endfor %}"
    with pytest.raises(TooCostly):
        ChatTemplate({"default": source}, limits=SMALL).render(HELLO)


def test_variables_of_a_loop_are_no_arguments_of_its_calls():
    source = "{% for m in messages %}{% set ns = namespace(a=1) %}{{ range(3) | list }}{% endfor %}"
    assert ChatTemplate({"default": source}).render(HELLO) == "[0, 1, 2]"


def test_a_template_that_is_slow_without_doing_much_is_stopped():
    ticks = count()
    sandbox = Sandbox(Limits(seconds=100), clock=lambda: float(next(ticks)))

    with pytest.raises(Exception, match="too long"):
        sandbox.from_string("{% for i in range(9999) %}{% endfor %}").render()


def test_an_endless_source_is_not_compiled():
    with pytest.raises(InvalidRequest, match="longer than"):
        ChatTemplate({"default": "x" * (MAX_SOURCE_CHARACTERS + 1)}).render(HELLO)


def test_each_rendering_has_its_own_fuel():
    template = ChatTemplate({"default": "{% for i in range(3000) %}{% endfor %}ok"}, limits=SMALL)

    assert [template.render(HELLO) for _ in range(10)] == ["ok"] * 10


def test_a_rendering_can_have_tighter_limits_than_its_template():
    template = ChatTemplate({"default": "{% for i in range(9999) %}{% endfor %}ok"})

    with pytest.raises(TooCostly):
        template.render(HELLO, limits=BRIEF)
    assert template.render(HELLO) == "ok"


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"corners"}))
def test_short_chats_fit_the_limits_of_the_event_loop(name: str):
    no_deadline = Limits(
        fuel=BRIEF.fuel, output_characters=BRIEF.output_characters
    )  # without the deadline, which a busy machine may miss
    template = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<s>", "eos_token": "</s>"})
    turns = [{"role": role, "content": "word " * 80} for _ in range(5) for role in ("user", "assistant")]

    assert template.render([*turns, *HELLO], limits=no_deadline)


def test_fuel_is_shared_with_loops_within_calls():
    source = "{% macro m() %}{% for i in range(9999) %}{% endfor %}{% endmacro %}" + "{{ m() }}" * 9

    with pytest.raises(InvalidRequest, match="too much"):
        ChatTemplate({"default": source}, limits=SMALL).render(HELLO)


def test_a_long_conversation_is_far_from_the_limits():
    messages = CONVERSATIONS["several turns"] + [
        {"role": role, "content": "word " * 500} for _ in range(500) for role in ("assistant", "user")
    ]

    prompt = ChatTemplate({"default": CHATML}, limits=Limits(fuel=Limits().fuel // 8)).render(messages)

    assert len(prompt) > 2_500_000


class Conversation(list[dict[str, str]]):
    """A list to which a weak reference may refer."""


@pytest.mark.parametrize("fails", ["", "{{ raise_exception('no') }}"])
def test_a_macro_does_not_keep_the_conversation_that_it_rendered(fails: str):
    source = "{% macro said(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}" + fails
    template = Sandbox().from_string(source)
    conversation = Conversation(HELLO)
    watched = weakref.ref(conversation)
    gc.disable()
    try:
        with contextlib.suppress(Exception):
            "".join(Sandbox().run(template, {"messages": conversation}, BRIEF))
        del conversation
        assert watched() is None
    finally:
        gc.enable()
