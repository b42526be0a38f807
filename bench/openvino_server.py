"""OpenVINO's continuous batching behind a minimal HTTP server, for compare.py.

Needs only `openvino-genai`, not infd.

    python bench/openvino_server.py MODEL.gguf --port 8000 --cache-gib 2
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openvino_genai
from bare_completions import Answer, serve

if TYPE_CHECKING:
    from queue import SimpleQueue


class Batching:
    """Steps while requests are in progress; requests that arrive during a step join the next."""

    def __init__(self, model: Path, cache_gib: int, streams: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_seqs = streams
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()

    def run(self, asked: SimpleQueue[Answer]) -> None:
        numbers = count()
        running: list[tuple[Answer, Any]] = []
        while True:
            while not running or not asked.empty():
                answer = asked.get()
                settings = openvino_genai.GenerationConfig(
                    max_new_tokens=answer.tokens, ignore_eos=True, do_sample=False
                )
                running.append((answer, self._pipeline.add_request(next(numbers), answer.prompt, settings)))
            self._pipeline.step()
            for answer, handle in running:
                while answer.tokens and handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            answer.say(self._tokenizer.decode([token]))
            running = [(answer, handle) for answer, handle in running if answer.tokens]

    def prompt_tokens(self, prompt: str) -> int:
        tokens: int = self._tokenizer.encode(prompt).input_ids.shape[1]
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    serve(Batching(arguments.model, arguments.cache_gib, arguments.streams), arguments.port)


if __name__ == "__main__":
    main()
