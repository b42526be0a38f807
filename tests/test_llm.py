"""`infd.LLM`: the embedded model in this process, its settings, its requests and its end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import infd
from infd.errors import CannotServe, CheckpointError, ConfigError, InvalidRequest, PromptTooLong, ServerStopped
from infd.offload import SWITCH_INTERVAL_S

SETTINGS = {"device": "cpu", "dtype": "float32", "device__threads": 1}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    with infd.LLM(**SETTINGS) as llm:
        yield llm


def test_a_conversation_is_answered(llm):
    (answer,) = llm.chat(QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_several_conversations_are_answered_in_order(llm):
    cities = ["France", "Italy", "Spain"]
    asked = [[{"role": "user", "content": f"What is the capital of {city}?"}] for city in cities]
    alone = [llm.chat(messages, temperature=0, max_tokens=20)[0].choices for messages in asked]
    assert [answer.choices for answer in llm.chat(iter(asked), temperature=0, max_tokens=20)] == alone
    assert alone[0] != alone[1] != alone[2]


def test_texts_and_token_ids_are_prompts(llm):
    fields = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    (one,) = llm.generate("One two three", **fields)
    (same,) = llm.generate(one.choices[0].prompt_token_ids, **fields)
    two = llm.generate(iter(["One two three", one.choices[0].prompt_token_ids]), **fields)
    ids = one.choices[0].token_ids
    assert len(ids) == 8
    assert [answer.choices[0].token_ids for answer in (same, *two)] == [ids, ids, ids]


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([]) == llm.chat([]) == []


def test_log_probabilities_are_objects(llm):
    (answer,) = llm.generate("One two", temperature=0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    assert len(answer.choices[0].logprobs.token_logprobs) == 2
    assert answer.choices[0].prompt_logprobs[1] is not None


def test_a_schema_constrains_the_answer(llm):
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    (answer,) = llm.chat(QUESTION, response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_more_requests_than_the_queue_takes_all_end():
    with infd.LLM(**SETTINGS, scheduler__max_waiting=2, max_num_seqs=2) as llm:
        answers = llm.generate([f"Number {number}" for number in range(40)], max_tokens=4)
    assert [len(answer.choices) for answer in answers] == [1] * 40


def test_threads_share_a_model(llm):
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: llm.chat(QUESTION, temperature=0, max_tokens=20), range(8))]
    assert len({answer.choices[0].message.content for (answer,) in answers}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 9}, "temperature"),
        ({"max_token": 9}, "unknown field max_token; the nearest known one is max_tokens"),
        ({"stream": True}, "stream is not for LLM"),
        ({"stop": object()}, "no JSON"),
    ],
)
def test_a_wrong_field_is_refused(llm, fields, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.chat(QUESTION, **fields)


def test_a_failed_request_ends_the_others(llm):
    with pytest.raises(PromptTooLong):
        llm.generate(["short", "long " * 100_000, "short"], max_tokens=4)
    assert llm.generate("after", max_tokens=4)[0].choices


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"max_model_length": 5},
            ConfigError,
            "unknown setting max_model_length; the nearest known one is model.max_mo",
        ),
        ({"max_model_len": -1}, ConfigError, r"LLM\(max_model_len=...\)"),
        ({"model": "/nonexistent"}, CheckpointError, "not a directory"),
        ({"config": "/nonexistent.toml"}, ConfigError, "nonexistent.toml: cannot be read"),
    ],
)
def test_a_wrong_setting_is_refused(settings, error, message):
    before = threading.active_count()
    with pytest.raises(error, match=message):
        infd.LLM(**settings)
    assert threading.active_count() <= before


def test_settings_come_from_a_file(tmp_path):
    path = tmp_path / "infd.toml"
    path.write_text('[model]\nserved_names = ["mine"]\nmax_model_len = 64\n')
    with infd.LLM(config=path, **SETTINGS) as llm:
        (answer,) = llm.chat(QUESTION, max_tokens=2)
        assert answer.model == "mine"
        with pytest.raises(InvalidRequest, match="64"):
            llm.generate("x", max_tokens=100)


def test_a_closed_model_answers_nothing():
    llm = infd.LLM(**SETTINGS)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, ["x"] * 50, max_tokens=200, ignore_eos=True)
        llm.close()
        llm.close()
        assert isinstance(running.exception(10), ServerStopped)
    with pytest.raises(ServerStopped):
        llm.generate("x")


def test_work_that_the_loop_takes_behind_its_last_turn_ends_too(monkeypatch):
    llm = infd.LLM(device="null")
    asked = threading.Event()

    def take(*_: object) -> Future[None]:
        asked.set()
        return Future()

    monkeypatch.setattr("infd.llm.asyncio.run_coroutine_threadsafe", take)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.embed, "x")
        assert asked.wait(10)
        llm.close()
        assert isinstance(running.exception(10), ServerStopped)


def test_the_interpreters_switch_interval_is_the_callers_again_once_all_models_are_closed():
    before = sys.getswitchinterval()
    with infd.LLM(device="null") as first:
        second = infd.LLM(device="null")
        second.embed("text")
        second.close()
        first.embed("text")
        assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_INTERVAL_S))
    with pytest.raises(CheckpointError):
        infd.LLM("/nonexistent")
    assert sys.getswitchinterval() == before


def test_a_program_ends_without_close():
    program = "import infd; print(infd.LLM(device__threads=1).generate('x', max_tokens=2)[0].usage.completion_tokens)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_importing_infd_imports_no_engine():
    program = "import sys, infd; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'aiohttp')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def pooling():
    """The null device, which embeds, classifies and compares by hashes."""
    with infd.LLM(device="null") as llm:
        yield llm


def test_embeddings_labels_and_scores_are_those_of_each_input(pooling):
    texts = [f"text {number}" for number in range(150)]  # of three requests
    vectors = pooling.embed(texts, dimensions=4)

    assert len(vectors) == 150
    assert all(len(vector) == 4 for vector in vectors)
    assert [pooling.embed(text, dimensions=4) for text in (texts[0], texts[149])] == [[vectors[0]], [vectors[149]]]
    assert pooling.embed([5, 6, 7]) == pooling.embed([[5, 6, 7]])
    assert pooling.embed(texts[0], dimensions=4, encoding_format="base64") == [vectors[0]], "always numbers"
    labels = pooling.classify(texts)
    assert [each.label for each in labels].count("LABEL_0") not in (0, 150)
    assert labels[149].probs == pooling.classify(texts[149])[0].probs
    assert pooling.score(texts[3], texts)[3] == pytest.approx(1)
    assert pooling.score(texts, texts) == pytest.approx([1] * 150)
    assert pooling.embed([]) == pooling.classify([]) == pooling.score("a", []) == []


def test_wrong_requests_to_pool_are_refused(pooling, llm):
    with pytest.raises(InvalidRequest, match="dimensions"):
        pooling.embed("a", dimension=4)
    with pytest.raises(InvalidRequest, match="2 queries beside 1 documents"):
        pooling.score(["a", "b"], ["c"])
    with pytest.raises(CannotServe, match="only generates text"):
        llm.embed("a")
