"""The replay of recorded replies: a test sampler repeats them, so that models without sense can be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from infd import LLM
from infd.runner.row_sampling import Integer
from infd.runner.sampler import Sampler

if TYPE_CHECKING:
    import torch

    from infd.runner.sampled import Likeliest, SampledPositions
    from infd.text.tokenizer import Tokenizer


class Replaying(Sampler):
    """Samples as ever, but the likeliest token of a row is the token of a reply.

    replies  by the seed of the request; not 0, which is the seed of the steps that are measured at start
    """

    replies: ClassVar[dict[int, list[int]]] = {}
    _at: SampledPositions | None = None

    def __call__(
        self,
        logits: Any,
        at: SampledPositions,
        allowed: Any,
        likeliest: Likeliest | None = None,
        samples: Any = None,
    ) -> Any:
        if likeliest is None:
            self._at = at
        elif self._replace(likeliest, at) and samples is None:  # the step has appended its own tokens
            self._rows.on_host.append(at.row_ids, at.ends.numpy(), likeliest.tokens.numpy())
        return super().__call__(logits, at, allowed, likeliest, samples)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        found, at = super().likeliest(logits), self._at
        self._at = None
        if at is not None:
            self._replace(found, at)
        return found

    def _replace(self, found: Likeliest, at: SampledPositions) -> bool:
        """Replace tokens in place; return whether any row has a reply."""
        if not self.replies:
            return False
        rows = self._rows.integers.numpy()[at.row_ids]
        places = zip(
            rows[:, Integer.SEED_LOW].tolist(), (at.ends.numpy() - rows[:, Integer.PROMPT]).tolist(), strict=True
        )
        tokens, any_reply = found.tokens.numpy(), False
        for i, (seed, place) in enumerate(places):
            if (reply := self.replies.get(seed)) is not None:
                tokens[i], any_reply = reply[min(place, len(reply) - 1)], True
        return any_reply


def replayed(encode: Any, entries: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers are the corpus's replies."""
    bodies = []
    for seed, entry in enumerate(entries, 1):
        prompt = encode(f"<|im_start|>user\n{entry['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        reply = encode(entry["reply"])[:tokens]
        Replaying.replies[seed] = reply
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
