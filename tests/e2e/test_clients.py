"""Structured output by clients that nobody here wrote, on the embedded model: their answers parse as they do elsewhere.

Some modes (JSON mode, prompted output) constrain the answer to an object and put the schema into the prompt alone. The
embedded model cannot follow a schema in its prompt, so these modes are asked for a model that accepts any object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pydantic
import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("no_telemetry"),
    pytest.mark.filterwarnings("ignore"),  # of the clients' libraries
]

openai = pytest.importorskip("openai")

MESSAGES: Any = [{"role": "user", "content": "Draw a circle."}]
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 300}


class Point(pydantic.BaseModel):
    kind: Literal["circle", "square"]
    size: int = pydantic.Field(ge=0, le=99)


class Shape(pydantic.BaseModel):
    """A nested schema with an enum, bounds, an array, a reference and a nullable field."""

    name: str = pydantic.Field(max_length=12)
    points: list[Point] = pydantic.Field(min_length=1, max_length=3)
    note: str | None = pydantic.Field(max_length=8)


class get_weather(pydantic.BaseModel):  # noqa: N801  # the name of a function
    """Get the current weather in a city"""

    city: str


class set_timer(pydantic.BaseModel):  # noqa: N801
    """Start a timer"""

    minutes: int


class AnyObject(pydantic.BaseModel, extra="allow"):
    """Accepts every JSON object."""


def test_openai_parses(client: openai.OpenAI):
    answer = client.chat.completions.parse(model="embedded", messages=MESSAGES, response_format=Shape, **SAMPLING)

    assert isinstance(answer.choices[0].message.parsed, Shape)
    assert answer.choices[0].finish_reason == "stop"


def test_openai_parses_every_choice(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model="embedded", messages=MESSAGES, response_format=Shape, n=3, temperature=1.5, max_tokens=300, seed=1
    )

    assert len({repr(choice.message.parsed) for choice in answer.choices}) > 1
    assert all(isinstance(choice.message.parsed, Shape) for choice in answer.choices)


def test_openai_parses_a_stream(client: openai.OpenAI):
    with client.chat.completions.stream(
        model="embedded", messages=MESSAGES, response_format=Shape, **SAMPLING
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert isinstance(final.choices[0].message.parsed, Shape)
    assert {"content.delta", "content.done"} <= kinds


@pytest.mark.parametrize(
    ("mode", "model"),
    [
        *(("TOOLS", Shape), ("TOOLS_STRICT", Shape), ("FUNCTIONS", Shape)),
        *(("JSON_SCHEMA", Shape), ("JSON_O1", Shape), ("JSON", AnyObject), ("MD_JSON", AnyObject)),
        *(("RESPONSES_TOOLS", Shape), ("RESPONSES_TOOLS_WITH_INBUILT_TOOLS", Shape)),
    ],
)
def test_instructor(client: openai.OpenAI, mode: str, model: type[pydantic.BaseModel]):
    instructor = pytest.importorskip("instructor")
    asked = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions
    answer = asked.create(model="embedded", messages=MESSAGES, response_model=model, max_retries=0, **SAMPLING)

    assert isinstance(answer, model)


def test_instructor_reads_parallel_calls(client: openai.OpenAI):
    instructor = pytest.importorskip("instructor")
    asked = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS).chat.completions
    question: Any = [{"role": "user", "content": "What's the weather in Lisbon?"}]
    models = Iterable[get_weather | set_timer]
    answer = asked.create(model="embedded", messages=question, response_model=models, max_retries=0, **SAMPLING)

    assert list(answer) == [get_weather(city="Lisbon")]


def test_instructor_reads_partial_answers(client: openai.OpenAI):
    instructor = pytest.importorskip("instructor")
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    parts = list(asked.create_partial(model="embedded", messages=MESSAGES, response_model=Shape, **SAMPLING))

    assert len(parts) > 1
    Shape.model_validate(parts[-1].model_dump())


@pytest.mark.parametrize(
    ("method", "schema"),
    [
        *(("json_schema", Shape), ("json_schema", Shape.model_json_schema()), ("json_mode", AnyObject)),
        *(("function_calling", Shape), ("function_calling", Shape.model_json_schema())),
    ],
)
def test_langchain(url: str, method: str, schema: Any):
    langchain = pytest.importorskip("langchain_openai")
    question = "Draw a circle of size 3."
    with openai.DefaultHttpxClient() as http_client:
        model = langchain.ChatOpenAI(
            model="embedded", base_url=url, api_key="none", max_retries=0, http_client=http_client, **SAMPLING
        )
        structured = model.with_structured_output(schema, method=method)
        answer = structured.invoke(question)
        *_, streamed = structured.stream(question)

    if isinstance(schema, dict):
        Shape.model_validate(answer)
    else:
        assert isinstance(answer, schema)
    assert streamed == answer


@pytest.mark.parametrize(
    ("kind", "model"), [("NativeOutput", Shape), ("PromptedOutput", AnyObject), ("ToolOutput", Shape)]
)
async def test_pydantic_ai(url: str, kind: str, model: type[pydantic.BaseModel]):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    output = getattr(pydantic_ai, kind)(model)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        served = models.OpenAIChatModel("embedded", provider=providers.OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(served, output_type=output, model_settings=SAMPLING, retries=0)
        answer = await agent.run("Draw a circle.")

    assert isinstance(answer.output, model)
