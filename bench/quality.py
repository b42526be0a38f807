"""Measure the loss of quality by a form of weights, compared with the float32 model on a text.

For each form: the Kullback-Leibler divergence of next-token distributions from the float32 model's, in nats per token;
the fraction of positions with the same likeliest token; and the perplexity of the text, beside the float32 model's. A
line of the text that is JSON with `messages` is rendered by the checkpoint's chat template.

    python bench/quality.py CHECKPOINT TEXT --tokens 8192
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from infd.kernels.families.attention import AttentionBatch, KeyValuePages
from infd.kernels.select import CACHED, CANDIDATES, quantized, select
from infd.models import registry
from infd.models.base import Batch
from infd.runner.arenas.arena import Arena
from infd.runner.arenas.cache import scaled
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load, required_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from infd.kernels.select import Candidate

CPU = torch.device("cpu")


class Form(NamedTuple):
    """Types and quantization of a run."""

    name: str
    dtype: torch.dtype
    candidates: Mapping[str, Sequence[Candidate]]


REFERENCES = {family: candidates[-1:] for family, candidates in CANDIDATES.items()}
FORMS = (
    Form("bfloat16", torch.bfloat16, CANDIDATES),
    Form("bfloat16, cache int8", torch.bfloat16, {**CANDIDATES, **CACHED["int8"]}),
    Form("bfloat16, cache fp8", torch.bfloat16, {**CANDIDATES, **CACHED["fp8"]}),
    Form("int8, vocabulary bfloat16", torch.bfloat16, quantized("int8", "none")),
    Form("int8", torch.bfloat16, quantized("int8")),
    Form("int4, vocabulary bfloat16", torch.bfloat16, quantized("int4", "none")),
    Form("int4, vocabulary int8", torch.bfloat16, quantized("int4")),
    Form("int4, vocabulary int4", torch.bfloat16, quantized("int4", "int4")),
)


class Text(NamedTuple):
    """A model that returns all logits of one sequence at a time."""

    checkpoint: Path
    form: Form
    longest: int

    def logits(self, sequences: Sequence[list[int]]) -> Iterator[Tensor]:
        """Return float32 logits [T, vocab] of each sequence."""
        ops = select(CPU, self.form.dtype, self.form.candidates)
        with Checkpoint(self.checkpoint) as checkpoint:
            stored = checkpoint.tensors
            model = registry.build(
                checkpoint.config, ops, dtype=self.form.dtype, device=CPU, max_len=self.longest, stored=stored
            )
            arena = Arena(required_bytes(model), CPU, "weights")
            load(model, checkpoint, arena)
        layout, tensors = model.cache_layout(self.longest), model.page_tensors(self.longest)
        # One page holds a whole sequence; page 0 is scratch.
        caches = {
            layer: scaled(KeyValuePages(*(torch.zeros(2, *each.shape, dtype=each.dtype) for each in tensors)), None)
            for group in layout.groups
            for layer in group.layers
        }
        for tokens in sequences:
            plans = [
                ops.attention.prepare(
                    AttentionBatch(
                        page_tokens=self.longest,
                        window=group.window,
                        starts=[0],
                        counts=[len(tokens)],
                        offsets=[0, len(tokens)],
                        start=torch.zeros(1, dtype=torch.int32),
                        table=torch.ones(1, 1, dtype=torch.int32),
                        slots=self.longest + torch.arange(len(tokens)),
                    )
                )
                for group in layout.groups
            ]
            batch = Batch(
                tokens=torch.tensor(tokens),
                positions=torch.arange(len(tokens)),
                attention=plans,
                cache=[caches[layer] for layer in sorted(caches)],
            )
            yield model.logits(model.forward(batch)).float()
        arena.release()


def read(checkpoint: Path, text: Path, longest: int, tokens: int) -> list[list[int]]:
    """Return the text as sequences of at most `longest` tokens, `tokens` tokens in total."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sequences, plain = [], []
    for line in text.read_text().splitlines(keepends=True):
        if line.startswith('{"') and "messages" in (said := json.loads(line)):
            rendered = tokenizer.apply_chat_template(said["messages"], tools=said.get("tools") or None, tokenize=False)
            sequences.append(tokenizer.encode(rendered, add_special_tokens=False)[:longest])
        else:
            plain.append(line)
    ids = tokenizer.encode("".join(plain), add_special_tokens=False) if plain else []
    sequences += [ids[at : at + longest] for at in range(0, len(ids), longest)]
    kept, total = [], 0
    for sequence in sequences:
        if len(sequence) > 1 and total < tokens:
            kept.append(sequence)
            total += len(sequence) - 1
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, about")
    parser.add_argument("--longest", type=int, default=512, help="tokens of one sequence")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sequences = read(arguments.checkpoint, arguments.text, arguments.longest, arguments.tokens)
    count = sum(len(sequence) - 1 for sequence in sequences)
    with torch.inference_mode():
        exact = Text(arguments.checkpoint, Form("float32", torch.float32, REFERENCES), arguments.longest)
        expected = [functional.log_softmax(logits[:-1], -1) for logits in exact.logits(sequences)]
        said = [torch.tensor(sequence[1:])[:, None] for sequence in sequences]
        loss = sum(-log.gather(1, next_).sum().item() for log, next_ in zip(expected, said, strict=True)) / count
        print(f"{count} tokens in {len(sequences)} sequences; perplexity in float32 {torch.tensor(loss).exp():.4f}")
        print("form                       KL nats   worst token   same best   perplexity   of float32's")
        for form in FORMS:
            divergences, same, lost = [], 0, 0.0
            logits = Text(arguments.checkpoint, form, arguments.longest).logits(sequences)
            for found, log, next_ in zip(logits, expected, said, strict=True):
                own = functional.log_softmax(found[:-1], -1)
                divergences.append(functional.kl_div(own, log, reduction="none", log_target=True).sum(-1))
                same += int((own.argmax(-1) == log.argmax(-1)).sum())
                lost -= own.gather(1, next_).sum().item()
            divergence = torch.cat(divergences)
            ratio = torch.tensor(lost / count - loss).exp()
            print(
                f"{form.name:25} {divergence.mean():9.6f} {divergence.max():13.4f} {same / count:11.2%}"
                f" {torch.tensor(lost / count).exp():12.4f} {ratio:14.5f}"
            )


if __name__ == "__main__":
    main()
