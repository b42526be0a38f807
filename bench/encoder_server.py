"""An encoder library behind a minimal HTTP server, for compare.py: POST /v1/embeddings, in batches of waiting texts.

Runs in an environment with aiohttp, numpy, tokenizers and the library, without infd. While a batch is computed, texts
of other requests gather, and the next batch takes as many as `--batch` allows, in order of length, so that padding is
small. onnxruntime and openvino read the files that bench/encoder_onnx.py writes.

    python -P bench/encoder_server.py sentence-transformers DIR --port 8000 --threads 2 --batch 32
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Array = npt.NDArray[np.float32]


class Library(Protocol):
    def embed(self, texts: Sequence[str]) -> tuple[Array, list[int]]:
        """Return normalized means over tokens [N, width], and the numbers of tokens. One forward pass."""


class SentenceTransformers:
    def __init__(self, directory: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(directory, device="cpu", local_files_only=True)
        self._tokenizer = _tokenizer(directory)

    def embed(self, texts: Sequence[str]) -> tuple[Array, list[int]]:
        vectors = self._model.encode(
            list(texts), batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return vectors, [len(each.ids) for each in self._tokenizer.encode_batch(list(texts))]


class Padded:
    """A graph of hidden states: texts are padded to the longest of their batch."""

    def __init__(self, directory: str, run: Callable[[dict[str, npt.NDArray[np.int64]]], Array]) -> None:
        self._tokenizer = _tokenizer(directory)
        self._tokenizer.enable_padding()
        self._run = run

    def embed(self, texts: Sequence[str]) -> tuple[Array, list[int]]:
        encoded = self._tokenizer.encode_batch(list(texts))
        mask = np.array([each.attention_mask for each in encoded], dtype=np.int64)
        hidden = self._run(
            {
                "input_ids": np.array([each.ids for each in encoded], dtype=np.int64),
                "attention_mask": mask,
                "token_type_ids": np.array([each.type_ids for each in encoded], dtype=np.int64),
            }
        )
        summed = np.einsum("nth,nt->nh", hidden, mask.astype(np.float32), optimize=True)
        return summed / np.linalg.norm(summed, axis=1, keepdims=True), mask.sum(axis=1).tolist()


def onnx_runtime(directory: str, threads: int) -> Padded:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(f"{directory}/model.onnx", options, providers=["CPUExecutionProvider"])
    return Padded(directory, lambda inputs: session.run(None, inputs)[0])


def openvino(directory: str, threads: int) -> Padded:
    import openvino as library

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = library.Core().compile_model(f"{directory}/plain.onnx", "CPU", settings).create_infer_request()
    return Padded(directory, lambda inputs: request.infer(inputs, share_inputs=True, share_outputs=True)[0])


LIBRARIES = {"sentence-transformers": SentenceTransformers, "onnxruntime": onnx_runtime, "openvino": openvino}


def _most_tokens(directory: str) -> int:
    most: int = json.loads(Path(directory, "sentence_bert_config.json").read_text())["max_seq_length"]
    return most


def _tokenizer(directory: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(_most_tokens(directory))
    return tokenizer


@dataclass
class Asked:
    """Texts of a request."""

    texts: list[str]
    answer: asyncio.Future[tuple[Array, int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, vectors: Array, tokens: int) -> None:
        """Pass on the answer. Callable from any thread."""
        self.answer.get_loop().call_soon_threadsafe(self._set, vectors, tokens)

    def _set(self, vectors: Array, tokens: int) -> None:
        if not self.answer.done():
            self.answer.set_result((vectors, tokens))


class Batches:
    """Computes waiting texts, a batch at a time."""

    def __init__(self, library: Library, most: int) -> None:
        self._library = library
        self._most = most
        self._asked: SimpleQueue[Asked] = SimpleQueue()

    def ask(self, texts: list[str]) -> asyncio.Future[tuple[Array, int]]:
        asked = Asked(texts)
        self._asked.put(asked)
        return asked.answer

    def run(self) -> None:
        while True:
            together = [self._asked.get()]
            while sum(len(each.texts) for each in together) < self._most:
                try:
                    together.append(self._asked.get_nowait())
                except Empty:
                    break
            texts = [text for asked in together for text in asked.texts]
            vectors, counts = self._embedded(texts)
            end = 0
            for asked in together:
                begin, end = end, end + len(asked.texts)
                asked.end(vectors[begin:end], sum(counts[begin:end]))

    def _embedded(self, texts: Sequence[str]) -> tuple[Array, list[int]]:
        """Return what `Library.embed` does, in as many passes as needed."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found: dict[int, tuple[Array, int]] = {}
        for begin in range(0, len(order), self._most):
            numbers = order[begin : begin + self._most]
            vectors, counts = self._library.embed([texts[number] for number in numbers])
            found |= dict(zip(numbers, zip(vectors, counts, strict=True), strict=True))
        ordered = [found[number] for number in range(len(texts))]
        return np.stack([vector for vector, _ in ordered]), [count for _, count in ordered]


def serve(batches: Batches, port: int) -> None:
    async def embeddings(request: web.Request) -> web.Response:
        body = await request.json()
        texts = body["input"]
        vectors, tokens = await batches.ask([texts] if isinstance(texts, str) else texts)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if body.get("encoding_format") == "base64"
                else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "data": data, "model": "encoder", "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "encoder", "object": "model"}]})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/v1/embeddings", embeddings), web.get("/v1/models", models)])
    threading.Thread(target=batches.run, daemon=True).start()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="most texts of a forward pass")
    arguments = parser.parse_args()
    serve(
        Batches(LIBRARIES[arguments.library](arguments.directory, arguments.threads), arguments.batch), arguments.port
    )


if __name__ == "__main__":
    main()
