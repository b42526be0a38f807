"""The embedded checkpoints are small and load in transformers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infd import embedded
from infd.embedded.recipe import heldout
from infd.text.chat import ChatTemplate
from infd.text.tokenizer import Tokenizer
from tests.text.templates import CONVERSATIONS, TOOLS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(embedded.path())


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def test_what_ships_keeps_to_its_budget():
    assert size(embedded.path()) < 12e6
    assert size(embedded.draft()) < 2e6
    adapters = sorted(path.parent for path in embedded.adapters().glob("*/adapter_config.json"))
    assert [adapter.name for adapter in adapters] == ["capitals", "pirate"]
    assert all(size(adapter) < 1e6 for adapter in adapters)


def test_the_draft_has_the_vocabulary_of_the_model():
    assert (embedded.draft() / "tokenizer.json").read_bytes() == (embedded.path() / "tokenizer.json").read_bytes()


def test_the_card_names_the_questions_it_was_examined_with():
    questions = hashlib.sha256(heldout.FILE.read_bytes()).hexdigest()

    assert questions in (embedded.path().parent / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("directory", [embedded.path(), embedded.draft()], ids=["model", "draft"])
def test_transformers_loads_every_weight_and_generates(directory: Path):
    model, found = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    prompt = torch.tensor([[1, 2, 3]])

    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)

    assert not any(found.values())
    assert model.dtype is torch.bfloat16
    assert ids.shape[0] == 1
    assert 4 <= ids.shape[1] <= 8


@pytest.mark.parametrize("text", ["Hello, world!", "你好 🙂", "def f(x):\n    return x", "<|im_start|>user\n<think>"])
def test_its_tokenizer_is_the_same_for_transformers_and_loses_nothing(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)

    assert ids == AutoTokenizer.from_pretrained(embedded.path()).encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < tokenizer.vocab_size == 3072


def test_control_tokens_are_hidden_and_markup_is_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("<|im_start|><think>x</think><tool_call></tool_call><|im_end|><|endoftext|>")

    assert len(ids) == 8
    assert tokenizer.decode(ids) == "<think>x</think><tool_call></tool_call>"


def test_a_turn_or_the_text_may_end_an_answer(tokenizer: Tokenizer):
    assert tokenizer.end_ids == {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}], ids=str)
def test_its_template_renders_as_transformers_does(
    tokenizer: Tokenizer, conversation: str, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
):
    messages = CONVERSATIONS[conversation]
    prompt = ChatTemplate.load(tokenizer).render(messages, tools=tools, kwargs=kwargs)

    assert prompt == AutoTokenizer.from_pretrained(embedded.path()).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert prompt.endswith("<|im_start|>assistant\n" if kwargs else "</think>\n\n")
    assert all(message["content"] in prompt for message in messages if isinstance(message.get("content"), str))


def test_an_unknown_role_is_refused_by_name(tokenizer: Tokenizer):
    with pytest.raises(Exception, match="the role judge is not known"):
        ChatTemplate.load(tokenizer).render([{"role": "judge", "content": "x"}])


def test_its_path_is_known_without_torch():
    program = "import sys; from infd import embedded; assert embedded.path().is_dir(); print('torch' in sys.modules)"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "False"
