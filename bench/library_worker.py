"""Answer a benchmark's orders with one library: bench/libraries.py starts this script in the library's environment.

    python bench/library_worker.py infd|llama.cpp|transformers MODEL --threads 2

An order is a line of JSON on stdin; its answer a line on stdout. {"prompts": [[ids]], "tokens": n} generates n tokens
for every prompt, greedily and together, and answers {"seconds": s}; {"texts": [[ids]], "to": FILE} writes the logits of
every position, float32 [T, vocabulary], one text after another, and answers {}. The first line is the answer to the
start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST = 2048  # tokens of a sequence
MOST = 8  # sequences together


class Library(Protocol):
    def generate(self, prompts: list[list[int]], tokens: int) -> None: ...

    def logits(self, texts: list[list[int]]) -> Iterator[Any]: ...


class Infd:
    """infd with its engine: requests pass validation, scheduler, sampler and detokenizer, but no socket."""

    def __init__(self, model: str, threads: int) -> None:
        from native_kernels import require_native_kernels

        from infd import LLM

        require_native_kernels()
        self._model = model
        self._llm = LLM(model, device="cpu", device__threads=threads, max_model_len=LONGEST, kv_cache_bytes="512MiB")

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        answers = self._llm.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
        assert all(answer.usage.completion_tokens == tokens for answer in answers)

    def logits(self, texts: list[list[int]]) -> Iterator[Any]:
        import torch
        from quality import Form, Text

        from infd.kernels.select import CANDIDATES

        form = Form("as served", torch.bfloat16, CANDIDATES)
        for each in Text(Path(self._model), form, LONGEST).logits(texts):
            yield each.float().numpy()


class LlamaCpp:
    """llama.cpp's library by its C interface: one batch a step, and the largest logit of each sequence."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp.llama_cpp as api
        import numpy as np

        self._api, self._numpy = api, np
        api.llama_log_set(_silent, None)
        api.llama_backend_init()
        loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        assert loaded is not None
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_seq_max = LONGEST * MOST, LONGEST, MOST
        settings.n_threads = settings.n_threads_batch = threads
        self._context = api.llama_init_from_model(loaded, settings)
        self._size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))
        self._batch = api.llama_batch_init(LONGEST, 0, 1)

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        self._clear()
        last, lengths = [], [len(prompt) for prompt in prompts]
        for number, prompt in enumerate(prompts):
            wanted = [place == len(prompt) - 1 for place in range(len(prompt))]
            self._decode([(token, place, number) for place, token in enumerate(prompt)], wanted)
            last.append(int(self._row(len(prompt) - 1).argmax()))
        for step in range(tokens - 1):
            rows = [(token, lengths[number] + step, number) for number, token in enumerate(last)]
            self._decode(rows, [True] * len(rows))
            last = [int(self._row(number).argmax()) for number in range(len(rows))]

    def logits(self, texts: list[list[int]]) -> Iterator[Any]:
        for text in texts:
            self._clear()
            self._decode([(token, place, 0) for place, token in enumerate(text)], [True] * len(text))
            yield self._numpy.stack([self._row(place) for place in range(len(text))])

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _decode(self, rows: list[tuple[int, int, int]], wanted: list[bool]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, place, sequence) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, place, 1, wanted[at]
            batch.seq_id[at][0] = sequence
        assert self._api.llama_decode(self._context, batch) == 0

    def _row(self, at: int) -> Any:
        found = self._api.llama_get_logits_ith(self._context, at)
        return self._numpy.ctypeslib.as_array(found, (self._size,)).copy()


class Transformers:
    """transformers in float32 on the dequantized weights: the reference of logits."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        path = Path(model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        place = path.parent if path.is_file() else path
        self._model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **where).eval()

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        raise NotImplementedError

    def logits(self, texts: list[list[int]]) -> Iterator[Any]:
        import torch

        with torch.inference_mode():
            for text in texts:
                yield self._model(torch.tensor([text])).logits[0].numpy()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: object) -> None:
    """Drop a message of llama.cpp's."""


LIBRARIES = {"infd": Infd, "llama.cpp": LlamaCpp, "transformers": Transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**fields: float) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    started = time.perf_counter()
    library: Library = LIBRARIES[arguments.library](arguments.model, arguments.threads)
    answer(seconds=time.perf_counter() - started)
    for line in sys.stdin:
        order = json.loads(line)
        if "prompts" in order:
            started = time.perf_counter()
            library.generate(order["prompts"], order["tokens"])
            answer(seconds=time.perf_counter() - started)
        else:
            with Path(order["to"]).open("wb") as file:
                for logits in library.logits(order["texts"]):
                    file.write(logits.astype("float32").tobytes())
            answer()


if __name__ == "__main__":
    main()
