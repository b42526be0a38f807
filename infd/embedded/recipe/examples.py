"""Turn conversations into training examples: token ids and loss weights.

The shipped chat template renders the text, so that training and serving see the
same format.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.embedded.recipe.conversation import Pool
from infd.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tokenizers

    from infd.embedded.recipe.conversation import Conversation
    from infd.embedded.recipe.mixture import Draw

_ANSWER: Final = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
_NOT_THINKING: Final = "<think>\n\n</think>\n\n"


class Example(Struct, frozen=True):
    """One conversation. `weights` has each token's weight in the loss: 1 in answers, 0 in prompts."""

    ids: list[int]
    weights: list[int]


class Writer:
    """Renders conversations with a chat template."""

    def __init__(self, template: str) -> None:
        self._template = ChatTemplate({"default": template})

    def prompt(self, conversation: Conversation) -> str:
        """Return the text before the last answer."""
        return self._template.render(
            conversation.messages[:-1],
            tools=conversation.tools or None,
            kwargs={"enable_thinking": True} if conversation.thinking else {},
        )

    def text(self, conversation: Conversation) -> str:
        """Return the text of the whole conversation, including the last answer."""
        opened = conversation.messages[-1]
        whole = self._template.render(
            conversation.messages, tools=conversation.tools or None, add_generation_prompt=False
        ).rstrip("\n")
        start = whole.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        answer = whole[start:]
        assert conversation.thinking == bool(opened.get("reasoning_content"))
        return self.prompt(conversation) + answer


def example(text: str, tokenizer: tokenizers.Tokenizer) -> Example:
    """Tokenize a rendered conversation and weight its tokens.

    In answers before the last, the first token has weight 0, because the text before it does not show whether the model
    was to think.
    """
    encoded = tokenizer.encode(text)
    weights = [0] * len(encoded.ids)
    answers = list(_ANSWER.finditer(text))
    for answer in answers:
        begin, end = answer.span(1)
        last = answer is answers[-1]
        if last and text.startswith(_NOT_THINKING, begin):
            begin += len(_NOT_THINKING)
        first = True
        for place, (left, right) in enumerate(encoded.offsets):
            if begin <= left and right <= end:
                weights[place] = 0 if first and not last else 1
                first = False
    return Example(encoded.ids, weights)


def batches(
    draw: Draw,
    seed: int,
    writer: Writer,
    tokenizer: tokenizers.Tokenizer,
    *,
    tokens: int,
    context: int,
    start: int = 0,
) -> Iterator[list[list[Example]]]:
    """Yield the batch of each training step from step `start` on, as a list of micro-batches.

    tokens   maximum tokens of a micro-batch, padding included
    context  maximum tokens of a conversation; longer conversations are skipped

    A batch depends only on the seed and the step's number, so that training can resume at any step. A micro-batch
    contains conversations of similar length.
    """
    step = start
    while True:
        rng = random.Random(f"{seed}:{step}")  # noqa: S311 (reproducible, not secret)
        drawn: list[Example] = []
        total = 0
        while total < STEP_TOKENS:
            one = example(writer.text(draw(rng, Pool.TRAIN)), tokenizer)
            if len(one.ids) <= context:
                drawn.append(one)
                total += len(one.ids)
        drawn.sort(key=lambda one: len(one.ids), reverse=True)
        yield list(_cut(drawn, tokens))
        step += 1


STEP_TOKENS: Final = 8192


def _cut(drawn: list[Example], tokens: int) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for one in drawn:
        longest = len(batch[0].ids) if batch else len(one.ids)
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(one)
    yield batch
