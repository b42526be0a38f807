"""Prompts equal those of transformers, byte for byte; errors are reported to the client."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from infd.errors import ConfigError, InvalidRequest
from infd.text.chat import ChatTemplate
from infd.text.tokenizer import Tokenizer
from tests.text.templates import CHATML, CONVERSATIONS, DOCUMENTS, PARTS, TEMPLATES, TOOLS, published
from tests.text.vocabularies import byte_level, write

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(write(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@cache
def ours(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Return the prompt, None if the template refuses."""
    try:
        return template.render(messages, **options)
    except InvalidRequest:
        return None


def rendered_by_transformers(
    theirs: Any, source: str, messages: list[dict[str, Any]], *, kwargs: dict[str, Any], **options: Any
) -> str | None:
    try:
        return theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options, **kwargs)
    except Exception:  # jinja's errors, ValueError, TypeError: all count as refusals
        return None


READ_PARTS = {"parts", "gemma3", "glm4"}  # for other templates infd joins the parts; transformers prints a list
ASK: dict[str, Any] = {"add_generation_prompt": True}
PLAIN: dict[str, Any] = {"add_generation_prompt": False}
CONTINUE: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "not_read": 1},
    {"enable_thinking": False, "date_string": "1 Jan 2030", "custom_tools": TOOLS, "tools_in_user_message": False},
    {
        "builtin_tools": ["weather", "code_interpreter"],
        "thinking": True,
        "controls": {"length": "short", "citations": 1},
    },
]


PAIRS = [(one, other) for one in TEMPLATES for other in CONVERSATIONS if other != "parts" or one in READ_PARTS]


@pytest.mark.parametrize(("template", "conversation"), PAIRS)
def test_the_prompt_is_that_of_transformers(theirs: Any, template: str, conversation: str):
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    extras = [{"tools": tools, "documents": documents} for tools in (None, TOOLS) for documents in (None, DOCUMENTS)]
    for options in (ASK, PLAIN, CONTINUE):
        for kwargs in VARIABLES:
            for more in extras:
                mine = rendered(ours(source), messages, kwargs=kwargs, **options, **more)

                assert mine == rendered_by_transformers(theirs, source, messages, kwargs=kwargs, **options, **more)


@pytest.mark.parametrize("template", TEMPLATES)
def test_most_of_that_comparison_is_not_of_refusals(template: str):
    prompts = [rendered(ours(TEMPLATES[template]), messages, tools=TOOLS) for messages in CONVERSATIONS.values()]
    taken = [prompt for prompt in prompts if prompt is not None]

    assert len(taken) >= len(prompts) // 3, "most conversations have tools, which some families refuse"
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize("text", ["so far", "so far ", "so far \n", "  so\n far", "x" * 50, "so far so far"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_continuing_ends_where_the_message_ends(theirs: Any, template: str, text: str):
    messages = [*HELLO, {"role": "assistant", "content": text}]
    options = {"continue_final_message": True, "add_generation_prompt": False}

    mine = rendered(ours(TEMPLATES[template]), messages, **options)

    assert mine == rendered_by_transformers(theirs, TEMPLATES[template], messages, kwargs={}, **options)


def test_parts_are_given_to_a_template_that_reads_them(theirs: Any):
    messages = [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}]

    assert ours(PARTS).render(messages) == rendered_by_transformers(
        theirs, PARTS, messages, kwargs={}, add_generation_prompt=True
    )


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ 'say: ' + messages[0].content }}"])
def test_parts_are_joined_for_a_template_that_reads_only_text(source: str):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]

    assert ours(source).render(messages).endswith("one\ntwo")


def test_continuing_a_message_of_parts_ends_with_its_last_text(theirs: Any):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "tw"}, {"type": "image"}]
    messages = [*HELLO, {"role": "assistant", "content": parts}]
    options = {"continue_final_message": True, "add_generation_prompt": False}

    prompt = ours(PARTS).render(messages, **options)  # type: ignore[arg-type]

    assert prompt == rendered_by_transformers(theirs, PARTS, messages, kwargs={}, **options)
    assert prompt.endswith("tw")


def test_arguments_that_are_json_text_are_printed_as_the_object():
    def conversation(arguments: object) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*HELLO, {"role": "assistant", "tool_calls": [call]}]

    render = ours("{{ messages[1].tool_calls[0].function.arguments | tojson }}").render

    assert render(conversation('{"a": "é"}')) == render(conversation({"a": "é"})) == '{"a": "é"}'
    assert render(conversation("")) == "{}"
    assert render(conversation("{not json")) == '"{not json"'


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}])
@pytest.mark.parametrize("printed", ["'' + call.arguments", "call.arguments"])
def test_a_template_that_prints_arguments_as_text_gets_json(arguments: Any, printed: str):
    source = (
        "{% for message in messages %}{% for each in message.tool_calls %}{% set call = each.function %}"
        f"{{{{ {printed} }}}}{{% endfor %}}{{% endfor %}}"
    )
    messages = [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    assert ours(source).render(messages) == '{"city": "Zürich"}'
    assert ours(source.replace(printed, "call.arguments.city")).render(messages) == "Zürich"


def test_the_callers_messages_stay_as_they_were():
    messages = CONVERSATIONS["tools"]
    before = json.dumps(messages)

    ours(CHATML).render(messages, tools=TOOLS)

    assert json.dumps(messages) == before


def test_strftime_now_is_the_time_of_rendering():
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, now=lambda: moment)

    assert template.render(HELLO) == "01 Mar 2026"
    moment = datetime(2027, 4, 2, tzinfo=UTC)
    assert template.render(HELLO) == "02 Apr 2027"


def test_templates_are_compiled_when_they_are_loaded(tmp_path: Path):
    template = ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level(), chat_template=CHATML)))
    loaded = dict(template._compiled)

    template.render(HELLO)
    assert template._compiled == loaded
    assert loaded


def test_a_checkpoint_whose_template_is_wrong_can_be_loaded(tmp_path: Path):
    template = ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level(), chat_template="{% if %}")))

    with pytest.raises(InvalidRequest, match="wrong in line 1"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "namespace"]
)
def test_a_request_cannot_set_reserved_variables(name: str):
    with pytest.raises(InvalidRequest, match=f"cannot set {name}") as refusal:
        ours(CHATML).render(HELLO, kwargs={name: 1})

    assert refusal.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no, ' + messages[0].content) }}", "no, Hello"),
        ("a\n{% if %}", "wrong in line 2"),
        ("{{ messages | nonsense }}", "nonsense"),
        ("{{ messages[0].content + 1 }}", "^chat template: "),
        ("{{ messages[9].content.strip() }}", "^chat template: "),
        ("{% include 'other' %}", "^chat template: "),
        ("{{ " + "(" * 50_000, "cannot be compiled"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "^chat template: "),
        ("{{ raise_exception('x' * 10000) }}", r"\.\.\.$"),
    ],
)
def test_a_failing_template_is_a_refusal_that_says_why(source: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        ours(source).render(HELLO)

    assert refusal.value.status == 400
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([], {}, "empty"),
        (HELLO, {"continue_final_message": True}, "exclude each other"),
        (
            [{"role": "assistant", "tool_calls": []}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "no text to continue",
        ),
    ],
)
def test_contradictions_are_refused(messages: list[dict[str, Any]], options: dict[str, Any], reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        ours(CHATML).render(messages, **options)


def test_a_message_that_the_template_drops_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="leaves out"):
        ours("{{ messages[0].role }}").render(HELLO, continue_final_message=True, add_generation_prompt=False)


def test_a_missing_template_error_names_the_remedy():
    template = ChatTemplate({})

    assert not template
    with pytest.raises(InvalidRequest, match=r"no chat template; start infd with --chat-template"):
        template.render(HELLO)


def test_a_template_for_tools_is_used_where_tools_are_given(theirs: Any, tmp_path: Path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    directory = write(tmp_path, byte_level(), chat_template=named)
    template = ChatTemplate.load(Tokenizer.load(directory))
    transformers = AutoTokenizer.from_pretrained(directory)

    for tools in (None, TOOLS):
        assert template.render(HELLO, tools=tools) == transformers.apply_chat_template(
            HELLO, tools=tools, tokenize=False
        )


def test_templates_without_a_default_are_listed():
    with pytest.raises(InvalidRequest, match="named rag, tool_use but no default"):
        ChatTemplate({"tool_use": "", "rag": ""}).render(HELLO)


def test_a_file_of_its_own_comes_before_the_configuration_and_a_given_file_before_both(tmp_path: Path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), chat_template="configured"))
    assert ChatTemplate.load(tokenizer).render(HELLO) == "configured"

    (tmp_path / "chat_template.jinja").write_text("own file, é")
    assert ChatTemplate.load(Tokenizer.load(tmp_path)).render(HELLO) == "own file, é"

    (tmp_path / "extras.jinja").write_text("extras {{ bos_token }}")
    assert ChatTemplate.load(tokenizer, tmp_path / "extras.jinja").render(HELLO) == "extras <s>"


@pytest.mark.parametrize("content", [None, b"\xff", b"{% if %}"])
def test_a_given_file_that_is_no_template_stops_the_start(tmp_path: Path, content: bytes | None):
    file = tmp_path / "extras.jinja"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"extras\.jinja"):
        ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level())), file)


def test_a_prompt_that_begins_with_bos_says_so():
    template = ours("{{ bos_token }}{{ messages[0].content }}")

    assert template.begins_with_bos(template.render(HELLO))
    assert not template.begins_with_bos("Hello")
    assert not ChatTemplate({"default": ""}).begins_with_bos("")


def test_a_missing_or_broken_template_is_logged_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level(), chat_template=CHATML)))
    assert not caplog.records

    ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level(), chat_template="{% if %}")))
    ChatTemplate.load(Tokenizer.load(write(tmp_path, byte_level())))
    broken, missing = caplog.records
    assert "--chat-template FILE" in broken.message
    assert "wrong in line 1" in vars(broken)["reason"]
    assert "no chat template" in missing.message
    assert "--chat-template FILE" in missing.message


DEEPSEEK_R1 = "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
FUNCTIONARY = "llama.cpp/meetkai-functionary-medium-v3.2"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("name", [DEEPSEEK_R1, "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", FUNCTIONARY])
def test_calls_without_content_are_written_whatever_the_client_sends_for_it(name: str, content: dict[str, Any]):
    template = ChatTemplate({"default": published()[name]}, {"bos_token": "<s>", "eos_token": "</s>"})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    text = template.render([{"role": "user", "content": "q"}, {"role": "assistant", **content, "tool_calls": [call]}])
    assert 'weather\n{"city": "Bern"}' in text.replace("```json\n", "")


def test_a_template_that_reads_functions_instead_of_tools_gets_them_and_the_time():
    source = published()["llama.cpp/fireworks-ai-llama-3-firefunction-v2"]
    moment = datetime(2026, 1, 2, 15, 4, 5, tzinfo=UTC)
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, now=lambda: moment)
    text = template.render([{"role": "user", "content": "q"}], tools=TOOLS)
    assert json.dumps([tool["function"] for tool in TOOLS], ensure_ascii=False, indent=4) in text
    assert "Today is 2026-01-02 15:04:05 PM UTC." in text
    asked = template.render([{"role": "user", "content": "q"}], kwargs={"functions": "none", "datetime": "later"})
    assert "\nnone\nToday is later." in asked
