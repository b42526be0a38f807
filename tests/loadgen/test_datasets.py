from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from infd.loadgen.datasets import synthetic
from infd.loadgen.datasets.call import Block, Call, DatasetError, Outline
from infd.loadgen.datasets.files import calls, recognized
from infd.loadgen.datasets.spec import File, Synthetic

if TYPE_CHECKING:
    from pathlib import Path

SHAREGPT = {"id": "1", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello there."}]}
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "x", "prompt": "Once"}}
MOONCAKE = [
    {"timestamp": 27_000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 30_500, "input_length": 700, "output_length": 6, "hash_ids": [1, 9]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def load(tmp_path: Path, text: str, name: str = "data.jsonl", count: int = 10, **fields: Any) -> list[Call]:
    path = tmp_path / name
    path.write_text(text)
    shape = fields.pop("shape", None) or recognized(str(path))
    return calls(File(path=str(path), shape=shape, shuffle=False, **fields), count, seed=0)


def outline(call: Call) -> Outline:
    assert isinstance(call.prompt, Outline)
    return call.prompt


@pytest.mark.parametrize("text", [json.dumps([SHAREGPT]), lines(SHAREGPT)])
def test_sharegpt_gives_the_first_turn_and_the_length_of_its_reply(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text, count=1) == [Call(prompt="Hi?", reply="Hello there.")]


def test_a_conversation_without_a_reply_is_left_out(tmp_path: Path) -> None:
    alone = {"conversations": [{"from": "human", "value": "Hi?"}]}

    assert len(load(tmp_path, lines(SHAREGPT, alone), count=2)) == 2  # the first one, twice
    with pytest.raises(DatasetError, match="no request in it"):
        load(tmp_path, lines(alone))


def test_a_batch_keeps_its_bodies_and_endpoints(tmp_path: Path) -> None:
    (call,) = load(tmp_path, lines(BATCH), count=1)

    assert (call.body, call.endpoint, call.output_tokens) == (BATCH["body"], "completions", None)


def test_prompts_are_texts_messages_or_plain_lines(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "b"}]
    found = load(tmp_path, lines({"prompt": "a", "output_tokens": 7}, {"messages": messages}, "c"), count=3)
    plain = load(tmp_path, "[INST] one\n\n  two\n", "data.txt", count=2)

    assert [(call.prompt, call.output_tokens) for call in found] == [("a", 7), (messages, 128), ("c", 128)]
    assert [call.prompt for call in plain] == ["[INST] one", "two"]


def test_prompts_of_a_mooncake_trace_share_the_blocks_of_equal_hashes(tmp_path: Path) -> None:
    first, second = load(tmp_path, lines(*reversed(MOONCAKE)))

    assert (first.at_s, second.at_s) == (27.0, 30.5)
    assert (outline(first).tokens, outline(second).tokens) == (1100, 700)
    assert outline(first).blocks[0] == outline(second).blocks[0] == Block("hash 1", 512)
    assert outline(first).blocks[2].tokens == 1100 - 2 * 512
    assert (first.output_tokens, second.output_tokens) == (5, 6)


def test_a_burstgpt_trace_is_replayed_without_its_failed_requests(tmp_path: Path) -> None:
    found = load(tmp_path, BURSTGPT, "trace.csv")

    assert [(call.at_s, outline(call).tokens, call.output_tokens) for call in found] == [(5, 472, 18), (118, 417, 276)]


def test_a_given_length_overrides_those_of_the_file(tmp_path: Path) -> None:
    found = load(tmp_path, lines(SHAREGPT), count=1, output_tokens=3)

    assert (found[0].output_tokens, found[0].reply) == (3, "")


def test_files_are_repeated_and_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("\n".join(map(str, range(20))))
    spec = File(path=str(path), shape="prompts")
    one, again, other = (calls(spec, 30, seed) for seed in (1, 1, 2))

    assert one == again != other
    assert sorted({str(call.prompt) for call in one}) == sorted(map(str, range(20)))


@pytest.mark.parametrize(
    ("text", "shape", "told"),
    [
        ("", None, "no request in it"),
        ("{\n", None, "line 1: not JSON"),
        (lines(SHAREGPT, {"x": 1}), None, "line 2: not of the shape sharegpt: .*conversations"),
        (lines({"x": 1}), None, "line 1: neither a conversation"),
        (lines({**BATCH, "url": "/v1/embeddings"}), None, "line 1: not of the shape batch"),
        (lines({"prompt": None}), None, "neither `prompt` nor `messages`"),
        (lines({**MOONCAKE[0], "input_length": 0}), None, "line 1: not of the shape mooncake"),
        ("Timestamp,Model\n1,x\n", None, "line 1: a BurstGPT trace has a column 'Request tokens'"),
        (BURSTGPT + "x,y,z,w,1,2\n", None, "line 5: .* must be numbers"),
        ("[" * 100_000, None, "not read: maximum recursion depth"),
        ('{"prompt": %s}' % ("9" * 5000), None, "line 1: not read: .* digits"),
        ("[1,\n", None, "line 2: not JSON"),
        (BURSTGPT.replace("5,ChatGPT,472,18", "NaN,ChatGPT,472,18"), None, "a request's time is not finite"),
        (BURSTGPT + "1" * 200_000 + "\n", None, "not CSV: field larger"),
        (lines({**MOONCAKE[0], "timestamp": math.inf}), None, "a request's time is not finite"),
        (lines(SHAREGPT), "mooncake", "line 1: not of the shape mooncake"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, shape: str | None, told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        load(tmp_path, text, shape=shape)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none.jsonl: No such file"):
        recognized(str(tmp_path / "none.jsonl"))


def test_random_lengths_fill_their_range() -> None:
    made = synthetic.calls(Synthetic(input_tokens=10, output_tokens=4, input_range=0.25, output_range=0.5), 2000, 0)

    assert {outline(call).tokens for call in made} == set(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert {call.output_tokens for call in made} == {2, 3, 4, 5, 6}


def test_equal_seeds_give_equal_requests_and_no_two_have_one_text() -> None:
    spec = Synthetic(input_tokens=20)
    one, again, other = (synthetic.calls(spec, 5, seed) for seed in (1, 1, 2))

    assert one == again != other
    assert len({call.prompt for call in (*one, *other)}) == 10


def test_shared_prefixes_take_turns_and_each_prompt_ends_in_a_text_of_its_own() -> None:
    made = synthetic.calls(Synthetic(input_tokens=20, shared=0.75, prefixes=2), 6, 0)
    prefixes = [outline(call).blocks[0] for call in made]

    assert {block.tokens for block in prefixes} == {15}
    assert prefixes[0] == prefixes[2] != prefixes[1]
    assert len({outline(call).blocks[1] for call in made}) == 6
    (whole,) = synthetic.calls(Synthetic(input_tokens=8, shared=1.0), 1, 0)
    assert [block.tokens for block in outline(whole).blocks] == [7, 1]
