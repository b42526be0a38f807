"""An encoder library behind a minimal HTTP server, for compare.py, in batches of waiting texts.

POST /v1/embeddings, or POST /rerank of a model whose config.json names an architecture for labels: a cross-encoder.
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
    Text = str | tuple[str, str]  # a pair: a query and a document


class Library(Protocol):
    def compute(self, texts: Sequence[Text]) -> tuple[Array, list[int]]:
        """Return a row [N, width] for each text, and the numbers of tokens, by one forward pass.

        The row of a text is its embedding, pooled as the model's files say and normalized; that of a pair is its score.
        """


class SentenceTransformers:
    def __init__(self, directory: str, threads: int) -> None:
        import torch
        from sentence_transformers import CrossEncoder, SentenceTransformer

        torch.set_num_threads(threads)
        self._scores = scores_pairs(directory)
        kind = CrossEncoder if self._scores else SentenceTransformer
        self._model: Any = kind(directory, device="cpu", local_files_only=True)
        self._tokenizer = _tokenizer(directory)

    def compute(self, texts: Sequence[Text]) -> tuple[Array, list[int]]:
        options: dict[str, Any] = {"batch_size": len(texts), "show_progress_bar": False}
        if self._scores:
            rows = self._model.predict(list(texts), **options)[:, None]
        else:
            rows = self._model.encode(list(texts), normalize_embeddings=True, **options)
        return rows, [len(each.ids) for each in self._tokenizer.encode_batch(list(texts))]


class Padded:
    """A graph of hidden states, or of a cross-encoder's logits: texts are padded to the longest of their batch."""

    def __init__(self, directory: str, run: Callable[[dict[str, npt.NDArray[np.int64]]], Array]) -> None:
        self._tokenizer = _tokenizer(directory)
        self._tokenizer.enable_padding()
        self._scores = scores_pairs(directory)
        self._first = not self._scores and _reads_first_token(directory)
        self._run = run

    def compute(self, texts: Sequence[Text]) -> tuple[Array, list[int]]:
        encoded = self._tokenizer.encode_batch(list(texts))
        mask = np.array([each.attention_mask for each in encoded], dtype=np.int64)
        output = self._run(
            {
                "input_ids": np.array([each.ids for each in encoded], dtype=np.int64),
                "attention_mask": mask,
                "token_type_ids": np.array([each.type_ids for each in encoded], dtype=np.int64),
            }
        )
        counts = mask.sum(axis=1).tolist()
        if self._scores:
            return 1 / (1 + np.exp(-output)), counts
        rows = output[:, 0] if self._first else np.einsum("nth,nt->nh", output, mask.astype(np.float32), optimize=True)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True), counts


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


def scores_pairs(directory: str) -> bool:
    """Return whether the model is a cross-encoder."""
    named: list[str] = json.loads(Path(directory, "config.json").read_text())["architectures"]
    return named[0].endswith("ForSequenceClassification")


def _reads_first_token(directory: str) -> bool:
    """Return whether an embedding is the first token's hidden state; if not, it is the mean over tokens."""
    pooling = json.loads(Path(directory, "1_Pooling", "config.json").read_text())
    first, mean = (pooling[f"pooling_mode_{name}"] for name in ("cls_token", "mean_tokens"))
    assert first != mean, "only the first token's hidden state and the mean over tokens are computed here"
    return bool(first)


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

    texts: list[Text]
    answer: asyncio.Future[tuple[Array, int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, rows: Array, tokens: int) -> None:
        """Pass on the answer. Callable from any thread."""
        self.answer.get_loop().call_soon_threadsafe(self._set, rows, tokens)

    def _set(self, rows: Array, tokens: int) -> None:
        if not self.answer.done():
            self.answer.set_result((rows, tokens))


class Batches:
    """Computes waiting texts, a batch at a time."""

    def __init__(self, library: Library, most: int) -> None:
        self._library = library
        self._most = most
        self._asked: SimpleQueue[Asked] = SimpleQueue()

    def ask(self, texts: list[Text]) -> asyncio.Future[tuple[Array, int]]:
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
            rows, counts = self._computed(texts)
            end = 0
            for asked in together:
                begin, end = end, end + len(asked.texts)
                asked.end(rows[begin:end], sum(counts[begin:end]))

    def _computed(self, texts: Sequence[Text]) -> tuple[Array, list[int]]:
        """Return what `Library.compute` does, in as many passes as needed."""
        lengths = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        order = sorted(range(len(texts)), key=lengths.__getitem__)
        found: dict[int, tuple[Array, int]] = {}
        for begin in range(0, len(order), self._most):
            numbers = order[begin : begin + self._most]
            rows, counts = self._library.compute([texts[number] for number in numbers])
            found |= dict(zip(numbers, zip(rows, counts, strict=True), strict=True))
        ordered = [found[number] for number in range(len(texts))]
        return np.stack([row for row, _ in ordered]), [count for _, count in ordered]


def serve(batches: Batches, port: int, *, scores: bool) -> None:
    """scores: whether texts are pairs."""

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

    async def rerank(request: web.Request) -> web.Response:
        body = await request.json()
        query, documents = body["query"], body["documents"]
        rows, tokens = await batches.ask([(query, text) for text in documents])
        order = sorted(range(len(documents)), key=rows[:, 0].__getitem__, reverse=True)
        results = [
            {"index": index, "relevance_score": float(rows[index, 0]), "document": {"text": documents[index]}}
            for index in order
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"id": "rerank", "model": "encoder", "usage": usage, "results": results})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "encoder", "object": "model"}]})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.get("/v1/models", models)])
    app.add_routes([web.post("/rerank", rerank) if scores else web.post("/v1/embeddings", embeddings)])
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
    library = LIBRARIES[arguments.library](arguments.directory, arguments.threads)
    serve(Batches(library, arguments.batch), arguments.port, scores=scores_pairs(arguments.directory))


if __name__ == "__main__":
    main()
