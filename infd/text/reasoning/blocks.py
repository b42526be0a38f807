"""The families whose thought is one block between two marks at the beginning of the answer: a table entry per family.

The model opens the block, or the prompt does (a model that always thinks), or the prompt contains a closed, empty block
(thinking is off). A block that is never closed extends to the first call, or to the end of the answer. An answer
without a block is content.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.constraint import Header, Thought
from infd.text.reasoning.base import BlockParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.text.chat import ChatTemplate


class Block(Struct, frozen=True):
    """See ReasoningSyntax.

    variants   further pairs of marks, which the family may write instead
    mentioned  texts that identify the family: its templates contain all of them; empty: the marks, see `matches`
    tokens     marks that are single tokens; empty: the opening and the closing mark
    answer     marks before and after the answer, which the parser removes; empty: none
    headed     header of constrained answers; None: the model may omit the marks of `answer`
    """

    opening: str
    closing: str
    variants: tuple[tuple[str, str], ...] = ()
    mentioned: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()
    headed: Header | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return (*(self.tokens or (self.opening, self.closing)), *self.answer)

    def matches(self, template: ChatTemplate) -> bool:
        if self.mentioned:
            return all(map(template.mentions, self.mentioned))
        # Some templates (OLMo 3) open the thought in the prompt, and never write its closing mark.
        return template.mentions(self.closing) or (
            template.mentions(self.opening) and template.opening().rstrip().endswith(self.opening)
        )

    def thought(self, prompt: str, continued: str) -> Thought | None:
        if self._answering(prompt, continued):
            return None
        for opening, closing in ((self.opening, self.closing), *self.variants):
            if continued.strip():
                if continued.rfind(opening) > continued.rfind(closing):
                    return Thought(opening, closing, inside=True, marks=self.tokens)
            elif prompt.rstrip().endswith(opening):
                return Thought(opening, closing, inside=True, marks=self.tokens)
            elif prompt.rstrip().endswith(closing):
                return None
        if continued.strip():
            return None
        return Thought(
            self.opening, self.closing, marks=self.tokens, variants=tuple(opening for opening, _ in self.variants)
        )

    def header(self, prompt: str, continued: str) -> Header | None:
        return None if continued.strip() or self._answering(prompt, continued) else self.headed

    def start(self, prompt: str, continued: str, ends: Sequence[str] = ()) -> BlockParser | None:
        thought = self.thought(prompt, continued)
        if self._answering(prompt, continued):
            return BlockParser(Thought(self.opening, self.closing), answer=self.answer, answering=True)
        if thought is not None:
            return BlockParser(thought, ends, variants=self.variants, answer=self.answer)
        if self.answer and not continued.strip():
            return BlockParser(Thought(self.opening, self.closing), answer=self.answer, closed=True)
        return None

    def _answering(self, prompt: str, continued: str) -> bool:
        """Return whether the prompt has opened the answer."""
        return bool(self.answer) and not continued.strip() and prompt.rstrip().endswith(self.answer[0])


QWEN3: Final = Block("<think>", "</think>")

# The templates of Granite 3.3 and Hunyuan A13B also mention the marks of Qwen3, so these two families precede Qwen3.
# The marks of ernie45, longcat and kimi are taken from the models' documentation, because
# tests/text/published_templates.json.xz contains no template of these families.
FAMILIES: Final[Mapping[str, Block]] = MappingProxyType(
    {
        "granite": Block(
            "Here is my thought process:",
            "Here is my response:",
            variants=(("Here's my thought process:", "Here's my response:"),),
            mentioned=("my thought process:", "my response:"),
        ),
        "granite33": Block(
            "<think>",
            "</think>",
            mentioned=("</think>", "<response></response>"),
            answer=("<response>", "</response>"),
        ),
        "ernie45": Block(
            "<think>", "</think>", mentioned=("</think>", "think_mode="), answer=("<response>", "</response>")
        ),
        "hunyuan_a13b": Block(
            "<think>",
            "</think>",
            mentioned=("</think>", "<|extra_0|>"),
            answer=("<answer>", "</answer>"),
            headed=Header("<answer>\n", ("<answer>", "</answer>"), closing="\n</answer>"),
        ),
        "hy_v3": Block("<think:opensource>", "</think:opensource>", mentioned=("</think{}>", ":opensource")),
        "mistral": Block("[THINK]", "[/THINK]"),
        "cohere_command3": Block("<|START_THINKING|>", "<|END_THINKING|>"),
        "gemma4": Block(
            "<|channel>thought",
            "<channel|>",
            mentioned=("<|channel>thought",),
            tokens=("<|channel>", "<channel|>"),
        ),
        "seed_oss": Block("<seed:think>", "</seed:think>"),
        "minimax_m3": Block("<mm:think>", "</mm:think>", mentioned=("<mm:think>",)),
        "apertus": Block("<|inner_prefix|>", "<|inner_suffix|>"),
        "apriel": Block("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        "longcat": Block("<longcat_think>", "</longcat_think>"),
        "kimi": Block("◁think▷", "◁/think▷"),
        "k2_horizon": Block(
            "<ifm|think>",
            "</ifm|think>",
            variants=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
            mentioned=("<ifm|think>",),
            tokens=tuple(f"<{end}ifm|think{speed}>" for speed in ("", "_fast", "_faster") for end in ("", "/")),
        ),
        "plamo3": Block(
            "<|plamo:begin_think:plamo|>",
            "<|plamo:end_think:plamo|>",
            tokens=("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
        ),
        "kimi_k3": Block(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            mentioned=("<|open|>", "<|close|>", "open_tag('think')"),
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
            answer=("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
            headed=Header(
                "<|open|>response<|sep|>",
                ("<|open|>", "<|close|>", "<|sep|>"),
                closing="<|close|>response<|sep|>",
                end="<|close|>message<|sep|>",
            ),
        ),
        "qwen3": QWEN3,
    }
)

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "deepseek_v4", "deepseek-v4"),
                *("deepseek_v41", "deepseek-v41", "dots", "gigachat35", "granite_thinking_parser", "ling3"),
                *(
                    "glm45",
                    "glm47",
                    "holo2",
                    "hy_v4",
                    "interns1",
                    "iquest_q1",
                    "kimi_k2",
                    "mimo",
                    "minicpmv",
                    "minimax",
                ),
                *("minimax_m2", "nanbeige", "nemotron_3", "nemotron_v3", "olmo3", "poolside_v1", "qwen3-thinking"),
                *("step3", "step3p5", "step5"),
            ),
            "qwen3",
        ),
        "apertus2509": "apertus",
        "hunyuan": "hunyuan_a13b",
        "minimax-m3": "minimax_m3",
        "cohere_command4": "cohere_command3",
        "identity": "none",
    }
)
