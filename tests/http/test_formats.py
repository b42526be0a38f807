from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from infd.engine.admission.ticket import Times
from infd.http.answer import ChoiceDelta, PromptReport
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.formats.base import Accepted, Format
from infd.http.formats.chat import ChatFormat
from infd.http.formats.completions import CompletionFormat
from infd.http.formats.openai import DONE
from infd.http.gathering import Gathering
from infd.http.json_body import decode
from infd.http.pieces import PIECE_TOKENS
from infd.request import FinishReason, TokenLogprobs
from infd.text.markup import Aside
from tests.http.model import tokenizer

TIMES = Times(admitted=1.0, started=1.5, first=2.0, last=4.0)
TICKET: Any = SimpleNamespace(
    id="abc", prompt_tokens=3, cached_tokens=1, generated_tokens=8, streams=[None, None], times=TIMES
)
TEXTS = ["plain", 'a "quoted"\n\\ line', "é 🎉\u2028", "</script>", "\x00\x1f"]


def chat_format(*, marked_up: bool = False, **fields: Any) -> ChatFormat:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "temperature": 1, **fields}
    said = decode(json.dumps(body).encode(), CHAT.decoder, 128)
    return ChatFormat(said, Accepted(TICKET, 'a "model"', tokenizer(), [(5, 6)], marked_up))


def completion_format(**fields: Any) -> CompletionFormat:
    said = decode(json.dumps({"prompt": [[5], [6, 7]], "n": 2, **fields}).encode(), COMPLETIONS.decoder, 128)
    return CompletionFormat(said, Accepted(TICKET, "m", tokenizer(), [(5,), (6, 7)]))


def decoded(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix(b"data: ")) for block in b"".join(events).split(b"\n\n")[:-1]]


def whole(format: Format, *deltas: ChoiceDelta) -> list[bytes]:
    """Return the body of a whole answer, given the deltas of its choices in order."""
    gathering = Gathering(len({delta.index for delta in deltas}), format.encode_logprobs)
    gathering.add(deltas)
    return format.whole(gathering.finish(1, 1))


def part(text: str, index: int = 0, *, token_ids: list[int] | None = None, **rest: Any) -> ChoiceDelta:
    return ChoiceDelta(index, text, token_ids or [3], rest.pop("logprobs", []), **rest)


@pytest.mark.parametrize("text", TEXTS)
def test_a_chunk_cut_around_its_text_equals_the_chunk_encoded_whole(text: str):
    format = chat_format(stream=True, stream_options={"include_usage": True})
    opening, quick = decoded(format.events(part(text, index=1)))
    (whole,) = decoded(format._event(part(text, index=1)))

    assert quick == whole
    assert quick["choices"] == [{"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert quick["usage"] is None

    completion = completion_format()
    (quick,) = decoded(completion.events(part(text, index=3)))
    assert quick["choices"] == [{"index": 3, "text": text, "logprobs": None, "finish_reason": None}]
    assert "usage" not in quick


@pytest.mark.parametrize("text", TEXTS)
def test_a_chunk_cut_around_its_thought_is_the_chunk_encoded_whole(text: str):
    format = chat_format(marked_up=True)
    thinking = part("", index=1, aside=Aside(text, 1))
    opening, quick = decoded(format.events(thinking))

    assert quick == decoded(format._event(thinking))[0]
    assert quick["choices"][0]["delta"] == {"reasoning_content": text, "reasoning": text}
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}


def test_an_event_holds_no_line_break_but_its_end():
    for text in TEXTS:
        for block in b"".join(chat_format().events(part(text))).split(b"\n\n")[:-1]:
            assert b"\n" not in block


def test_tokens_without_text_yet_send_no_event():
    format = completion_format()

    assert format.events(part("")) == []


def test_each_choice_has_events_of_its_own():
    format = completion_format()
    parts = part("a", index=0), part("b", index=2), part("c", index=0)
    events = [event for each in parts for event in decoded(format.events(each))]

    assert [(event["choices"][0]["index"], event["choices"][0]["text"]) for event in events] == [
        (0, "a"),
        (2, "b"),
        (0, "c"),
    ]


def test_the_last_event_has_the_finish_reason():
    finish = part("end", finish=FinishReason.STOP, stop_reason="###")

    _, event = decoded(chat_format().events(finish))

    assert event["choices"] == [
        {
            "index": 0,
            "delta": {"content": "end"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "###",
            "matched_stop": "###",
        }
    ]


def test_usage_comes_last_if_asked_for_and_in_every_event_if_asked_for():
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    last = chat_format(stream=True, stream_options={"include_usage": True})
    every = chat_format(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})

    (closing,) = decoded([last.last_events().removesuffix(DONE)])
    assert (closing["choices"], closing["usage"]) == ([], usage)
    before = usage | {"completion_tokens": 7, "total_tokens": 10}
    assert [event["usage"] for event in decoded(every.events(part("a")))] == [before, usage]
    assert chat_format().last_events() == DONE


def test_timings_come_with_the_final_usage_and_only_there():
    timings = {
        "queue_ms": 500.0,
        "cache_n": 1,
        "prompt_n": 2,
        "prompt_ms": 500.0,
        "prompt_per_second": 4.0,
        "predicted_n": 8,
        "predicted_ms": 2000.0,
        "predicted_per_second": 3.0,
    }
    for streamed in (chat_format, completion_format):
        format = streamed(stream=True, stream_options={"include_usage": True})
        assert all("timings" not in event for event in decoded(format.events(part("a"))))
        (closing,) = decoded([format.last_events().removesuffix(DONE)])
        assert closing["timings"] == timings
    for format in (chat_format(), completion_format()):
        assert json.loads(b"".join(whole(format, part("a"))))["timings"] == timings


def test_an_answer_without_a_token_has_no_timings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TICKET, "times", Times(1.0, None, None, None))

    assert "timings" not in json.loads(b"".join(whole(chat_format(), part(""))))


def test_chat_logprobs_report_bytes_of_tokens_and_the_likeliest_tokens():
    pair = tokenizer().encode("ab")[0]
    (half,) = tokenizer().encode("é")[:1]
    encoded_logprobs = part(
        "ab", token_ids=[pair, half], logprobs=[TokenLogprobs(-0.5, (half,), (-0.5,)), TokenLogprobs(-1e9)]
    )

    body = json.loads(b"".join(whole(chat_format(logprobs=True, top_logprobs=1), encoded_logprobs)))

    assert body["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "ab",
                "logprob": -0.5,
                "bytes": [97, 98],
                "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}],
            },
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []},
        ]
    }


def test_completion_logprobs_are_parallel_lists_whose_offsets_go_on():
    format = completion_format(logprobs=1)
    a, b = tokenizer().encode("ab")[0], tokenizer().encode("c")[0]

    (first,) = decoded(format.events(part("ab", token_ids=[a], logprobs=[TokenLogprobs(-1.0, (b,), (-0.5,))])))
    (second,) = decoded(format.events(part("c", token_ids=[b], logprobs=[TokenLogprobs(-0.2, (b,), (-0.2,))])))

    assert first["choices"][0]["logprobs"] == {
        "text_offset": [0],
        "token_logprobs": [-1.0],
        "tokens": ["ab"],
        "top_logprobs": [{"c": -0.5, "ab": -1.0}],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


def test_logprobs_name_tokens_by_id_on_request():
    a, b, half = tokenizer().encode("ab")[0], tokenizer().encode("c")[0], tokenizer().encode("é")[0]
    answer = part("ab", token_ids=[a], logprobs=[TokenLogprobs(-1.0, (b, half), (-0.5, -0.6))])

    chat = chat_format(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    (entry,) = json.loads(b"".join(whole(chat, answer)))["choices"][0]["logprobs"]["content"]
    completion = completion_format(logprobs=2, return_tokens_as_token_ids=True)
    lists = [
        event["choices"][0]["logprobs"] for event in decoded(completion.events(answer) + completion.events(answer))
    ]

    assert (entry["token"], entry["bytes"]) == (f"token_id:{a}", [97, 98])
    assert [each["token"] for each in entry["top_logprobs"]] == [f"token_id:{b}", f"token_id:{half}"]
    assert lists[0]["tokens"] == [f"token_id:{a}"]
    assert lists[0]["top_logprobs"] == [{f"token_id:{b}": -0.5, f"token_id:{half}": -0.6, f"token_id:{a}": -1.0}]
    assert lists[1]["text_offset"] == [2], "offsets count characters of the answer"


@pytest.mark.parametrize("count", [PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS])
def test_logprobs_of_many_tokens_in_one_event_equal_those_of_single_events(count: int):
    scores = [TokenLogprobs(-i / 7, (300, 301), (-i / 7, -i / 3)) for i in range(count)]
    for make in (lambda: chat_format(logprobs=True, top_logprobs=2), lambda: completion_format(logprobs=2)):
        one, many = make(), make()
        at_once = decoded(one.events(part("b" * count, token_ids=[300] * count, logprobs=scores)))
        singly = [
            event for each in scores for event in decoded(many.events(part("b", token_ids=[300], logprobs=[each])))
        ]
        lists = at_once[-1]["choices"][0]["logprobs"]
        told = [logprobs for event in singly if (logprobs := event["choices"][0]["logprobs"])]
        assert lists == {name: [value for each in told for value in each[name]] for name in lists}
        assert {len(values) for values in lists.values()} == {count}


def test_token_ids_are_shown_where_asked_with_the_prompt_they_answer():
    format = completion_format(return_token_ids=True)
    chunk = decoded(format.events(part("a", index=2)) + format.events(part("b", index=2)))
    assert [event["choices"][0].get("prompt_token_ids") for event in chunk] == [[6, 7], None]
    assert [event["choices"][0]["token_ids"] for event in chunk] == [[3], [3]]

    body = json.loads(b"".join(whole(chat_format(return_token_ids=True), part("a"))))
    assert body["prompt_token_ids"] == [5, 6]
    assert body["choices"][0]["token_ids"] == [3]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"prompt_logprobs": 0, "echo": True, "logprobs": 20}])
def test_the_prompts_part_of_all_choices_is_kept_once_in_pieces(fields: dict[str, Any]):
    likely = TokenLogprobs(-1.5, tuple(range(300, 320)), tuple(-1.0 - i for i in range(20)), 7)
    report = PromptReport((300,) * 500, "b" * 500 if "echo" in fields else None, scored=True, scores=[likely] * 499)
    parts = [
        part("a", index=index, prompt=report, logprobs=[likely], finish=FinishReason.LENGTH) for index in range(64)
    ]

    streamed = completion_format(n=64, **fields)
    events = [piece for each in parts for piece in streamed.events(each)]
    for pieces in (whole(completion_format(n=64, **fields), *parts), events):
        kept = {id(piece): len(piece) for piece in pieces}
        assert sum(map(len, pieces)) > 20 * sum(kept.values())
        assert max(kept.values()) < 2**16


def test_text_is_never_taken_for_a_place_to_fill():
    texts = ["\0", "\u00ff", "\xff", '"choices"', "\U0001f600"]
    body = json.loads(b"".join(whole(completion_format(n=3), *map(part, texts, range(5)))))

    assert [choice["text"] for choice in body["choices"]] == texts
