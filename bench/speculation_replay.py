"""The replay of recorded replies: a test sampler repeats them, so that models without sense can be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import infd.runner.fused
import infd.runner.runner
from infd import LLM
from infd.runner.fused import LikeliestSamples
from infd.runner.row_sampling import Integer
from infd.runner.sampler import Sampler

if TYPE_CHECKING:
    import torch

    from infd.runner.rows import Rows
    from infd.runner.sampled import Likeliest, SampledPositions
    from infd.text.tokenizer import Tokenizer

# By the seed of the request; not 0, which is the seed of the steps that are measured at start.
REPLIES: dict[int, list[int]] = {}


def replay() -> None:
    """Let models that are loaded from now on repeat the replies: the likeliest token of a row is a reply's token."""
    infd.runner.runner.Sampler = Replaying  # type: ignore[misc]
    infd.runner.fused.LikeliestSamples = ReplayingSamples  # type: ignore[misc]


class ReplayingSamples(LikeliestSamples):
    """The samples of a step as one call."""

    def sample(self, mask: Any) -> None:
        count, buffers = sum(span.count for span in self._spans), self._steps.buffers
        row_ids, ends, tokens = (each[:count].numpy() for each in (buffers.row, buffers.end, buffers.token))
        _replace(self._steps.rows, row_ids, ends, tokens)
        super().sample(mask)


class Replaying(Sampler):
    """Samples of other steps."""

    _at: SampledPositions | None = None

    def __call__(self, logits: Any, at: SampledPositions, *args: Any, **kwargs: Any) -> Any:
        self._at = at
        return super().__call__(logits, at, *args, **kwargs)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        found, at = super().likeliest(logits), self._at
        self._at = None
        if at is not None:
            _replace(self._rows, at.row_ids, at.ends.numpy(), found.tokens.numpy())
        return found


def _replace(rows: Rows, row_ids: Any, ends: Any, tokens: Any) -> None:
    """Replace tokens of rows that have a reply."""
    of_rows = rows.integers.numpy()[row_ids]
    for i, (seed, prompt) in enumerate(of_rows[:, (Integer.SEED_LOW, Integer.PROMPT)].tolist()):
        if (reply := REPLIES.get(seed)) is not None:
            tokens[i] = reply[min(int(ends[i]) - prompt, len(reply) - 1)]


def replayed(encode: Any, entries: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers are the corpus's replies."""
    bodies = []
    for seed, entry in enumerate(entries, 1):
        prompt = encode(f"<|im_start|>user\n{entry['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        reply = encode(entry["reply"])[:tokens]
        REPLIES[seed] = reply
        bodies.append(
            {
                "prompt": prompt,
                "max_tokens": len(reply),
                "temperature": 0,
                "seed": seed,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
    return bodies


def tokenizer() -> Tokenizer:
    """Return SmolLM2's tokenizer."""
    with LLM("smollm2", device="cpu", max_model_len=256, kv_cache_bytes="16MiB") as model:
        found: Tokenizer = model._server._backend.model().tokenizer
    return found
