"""ONNX Runtime GenAI behind a minimal HTTP server, for compare.py.

Needs only `onnxruntime-genai`, not infd. On a CPU it batches only requests that begin together; a later request waits
for the end of the batch.

    python bench/onnxruntime_server.py DIR --port 8000 --threads 2
"""

from __future__ import annotations

import argparse
import json
from queue import Empty
from typing import TYPE_CHECKING

import onnxruntime_genai
from bare_completions import Answer, serve

if TYPE_CHECKING:
    from queue import SimpleQueue

_TOGETHER_S = 0.005  # a request that follows another within this time joins its batch


class Batches:
    """Runs batches in sequence. Shorter prompts are padded; shorter answers are computed to full length and cut."""

    def __init__(self, directory: str, threads: int, streams: int) -> None:
        config = onnxruntime_genai.Config(directory)
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = onnxruntime_genai.Model(config)
        self._tokenizer = onnxruntime_genai.Tokenizer(self._model)
        self._streams = streams

    def run(self, asked: SimpleQueue[Answer]) -> None:
        while True:
            batch = [asked.get()]
            while len(batch) < self._streams:
                try:
                    batch.append(asked.get(timeout=_TOGETHER_S))
                except Empty:
                    break
            self._answer(batch)

    def _answer(self, batch: list[Answer]) -> None:
        prompts = self._tokenizer.encode_batch([answer.prompt for answer in batch]).as_numpy()
        length = prompts.shape[1] + max(answer.tokens for answer in batch)
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        # Minimum and maximum length are equal, so an end token does not end an answer.
        parameters.set_search_options(batch_size=len(batch), max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, parameters)
        generator.append_tokens(prompts)
        while any(answer.tokens for answer in batch):
            generator.generate_next_token()
            for answer, token in zip(batch, generator.get_next_tokens(), strict=True):
                if answer.tokens:
                    answer.say(self._tokenizer.decode([token]))

    def prompt_tokens(self, prompt: str) -> int:
        return len(self._tokenizer.encode(prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    serve(Batches(arguments.directory, arguments.threads, arguments.streams), arguments.port)


if __name__ == "__main__":
    main()
