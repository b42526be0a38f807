"""The fuzz targets. A target takes bytes, and raises only if infd violates an invariant."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import socket
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import uvloop

from infd import embedded
from infd.admin.commands import VERBS, AdminContext
from infd.admin.server import AdminServer
from infd.apart.client import Worker
from infd.config import LimitsConfig
from infd.errors import CheckpointError, RequestError, TextFailed
from infd.http import json_body, sampling
from infd.http.conversation import template_messages, template_tools, tool_specs
from infd.http.schema.chat import ChatRequest, Message
from infd.http.schema.completions import CompletionRequest
from infd.http.schema.tokens import DetokenizeRequest, TokenizeRequest
from infd.http.schema.tools import Called, Function, Tool
from infd.text import apart
from infd.text.chat import PROBING, ChatTemplate
from infd.text.fuel import BRIEF, Limits
from infd.text.reasoning.blocks import QWEN3
from infd.text.reply import Reply
from infd.text.stops import StopStrings
from infd.text.syntax import Syntax
from infd.text.tokenizer import Tokenizer
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from infd.weights.checkpoint import TensorFile
from tests.admin.settings import fixed
from tests.fuzz.grammar import Chooser, mapping
from tests.fuzz.hostile import template, text, tokenizer
from tests.fuzz.wire import BODIES, LAST, cut, made, statuses
from tests.http.endpoint import serving
from tests.text import transcripts

if TYPE_CHECKING:
    from collections.abc import Callable


SILENCE_S = 0.03
MARGIN_S, START_S = 3.0, 3.0  # above a cap, and to start a process, on a busy machine
ATTEMPTS = 3
MOST_KIB = 2**19  # by which one input may raise the peak memory of this process


def fields(kind: Any) -> tuple[str, ...]:
    """The names of the fields of a Struct, or of the Structs of a union."""
    return tuple(name for each in get_args(kind) or (kind,) for name in each.__struct_fields__)


NESTED = (*fields(Tool), *fields(Function), *fields(Called), "arguments")


class Target(ABC):
    """Called with each input.

    noise  number of damaged inputs that the ordinary suite tries
    """

    noise = 600

    @abstractmethod
    def __call__(self, data: bytes) -> None: ...

    def close(self) -> None:  # noqa: B027 -- most targets hold nothing
        """Close files and sockets."""


class RequestTarget(Target):
    """JSON to a checked request: any body is accepted, or refused with a RequestError.

    The first byte selects the request, and whether the rest is a body or generates one.
    """

    def __init__(self) -> None:
        kinds = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
        self._kinds = [
            (msgspec.json.Decoder(kind), (*fields(kind), *fields(Message), *NESTED, "5", "-3", "x")) for kind in kinds
        ]
        self._limits = LimitsConfig()

    def __call__(self, data: bytes) -> None:
        choose = Chooser(data[1:])
        decoder: msgspec.json.Decoder[Any]
        decoder, names = self._kinds[data[0] % len(self._kinds)] if data else self._kinds[0]
        text = data[1:] if data and data[0] & 0x80 else mapping(choose, names).encode("utf-8", "surrogatepass")
        try:
            request = json_body.decode(text, decoder, self._limits.json_depth)
            if isinstance(request, ChatRequest | CompletionRequest):
                sampling.check(request, self._limits)
            if isinstance(request, ChatRequest):
                template_messages(request.messages)
                template_tools(tool_specs(request.tools or ()))
        except RequestError:
            pass


class HeaderTarget(Target):
    """A safetensors file: refused with a CheckpointError, or every tensor can be read.

    The first byte selects whether the rest is the file, is its header and data, or generates a header.
    """

    NAMES = ("w", "v", "dtype", "shape", "data_offsets", "__metadata__", "F32", "BF16", "F4", "U8")

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="infd-fuzz-")
        self._path = Path(self._directory.name, "model.safetensors")

    def __call__(self, data: bytes) -> None:
        kind, data = (data[0] % 4, data[1:]) if data else (0, data)
        if kind:
            header, _, rest = data.partition(b"\0")
            if kind > 1:
                header = self._header(Chooser(data), kind).encode("utf-8", "surrogatepass")
            data = struct.pack("<Q", len(header)) + header + rest
        self._path.write_bytes(data)
        try:
            file = TensorFile(self._path)
        except CheckpointError:
            return
        for tensor in file.tensors:
            assert tensor.offset + tensor.bytes <= len(data)
            tensor.read(memoryview(bytearray(tensor.bytes)))
        file.close()

    def _header(self, choose: Chooser, kind: int) -> str:
        if kind == 2:
            return mapping(choose, self.NAMES)
        entries, at = [], 0
        for number in range(choose.below(4)):
            shape = [choose.below(4) for _ in range(choose.below(4))]
            end = at + choose.below(40)
            dtype = choose.pick(("F32", "BF16", "U8", "F4", "X"))
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [at - choose.below(2), end]}
            entries.append(f'"t{number}":{json.dumps(entry)}')
            at = end
        return f"{{{','.join(entries)}}}"

    def close(self) -> None:
        self._directory.cleanup()


class StopTarget(Target):
    """Ids to text under stop strings: equal to a search of the whole text, and no text is returned too early."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load(embedded.path())

    def __call__(self, data: bytes) -> None:
        head, _, tail = data.partition(b"\xff")
        stops = [part.decode("utf-8", "ignore") for part in head.split(b"\xfe")[:8]]
        stops = [stop for stop in stops if stop]
        vocabulary = self._tokenizer.vocab_size
        ids = [(tail[i] << 8 | tail[i + 1]) % vocabulary for i in range(0, len(tail) - 1, 2)]
        whole = self._tokenizer.decode(ids)
        reply, text = Reply(self._tokenizer, StopStrings(stops)), ""
        for token in ids:
            used = reply.feed([token])
            text += reply.take()
            assert whole.startswith(text)
            assert not any(stop in text for stop in stops)
            if used is not None:
                break
        text += reply.finish()
        ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
        if ends:
            end, minus = min(ends)
            whole = whole[: end + minus]
        assert text == whole, (stops, ids)


class MarkupTarget(Target):
    """Text to thoughts, calls and content: independent of the cuts of the text; only marks, white space and frames of
    calls are dropped.

    The first byte selects the cuts and the vocabulary.
    """

    WORDS = (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        '"',
        "\\",
        "}",
        "{",
        "\n",
    )

    def __call__(self, data: bytes) -> None:
        kind, data = (data[0], data[1:]) if data else (0, data)
        if kind & 0x80:
            text = "".join(self.WORDS[byte] if byte < len(self.WORDS) else chr(byte) for byte in data)
        else:
            text = data.decode("utf-8", "ignore")
        size = 1 + kind % 7
        prompt = "<think>\n" if kind & 0x40 else ""
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        whole = self._read(prompt, [text])
        assert whole == self._read(prompt, parts), (prompt, parts)
        content, thought, calls = whole
        if not calls and "think>" not in text:
            assert content.strip() + thought.strip() == text.strip()
        parsed = len(content) + len(thought) + sum(len(name) + len(arguments) for name, arguments in calls)
        assert parsed <= len(text)

    def _read(self, prompt: str, parts: list[str]) -> transcripts.Message:
        reading = Syntax(QWEN3, HERMES).start(prompt, offered=Offered({"f": b""}))
        assert reading is not None
        return transcripts.read(reading, parts)


class HostileTarget(Target):
    """Text of a checkpoint, in process if it is vetted, otherwise in a worker: it ends by its time cap, at most with a
    refusal, and takes bounded memory.

    Counted is the processor time of this process, because a busy machine delays any input; an input that is slow in
    every attempt is a finding. An input that waits for the worker longer than the worker's cap ends at `-timeout`.
    """

    noise = 25

    def __init__(self) -> None:
        self._worker = Worker(apart.MODULE)

    def __call__(self, data: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(ATTEMPTS):
            began = time.process_time()
            cap = self.use(Chooser(data))
            if (took := time.process_time() - began) < cap:
                break
        else:
            raise AssertionError(f"{data.hex()} took {took:.1f} s, more than {cap:.1f}")
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert more < MOST_KIB, f"{data.hex()} took {more} KiB"

    @abstractmethod
    def use(self, choose: Chooser) -> float:
        """Load and use an input; return its time cap in seconds."""

    def close(self) -> None:
        self._worker.close()


class TemplateTarget(HostileTarget):
    """A chat template: compiled, and rendered with a short or a long conversation."""

    SHORT = ({"role": "user", "content": "some words, " * 200}, {"role": "assistant", "content": "é🙂"})
    LONG = ({"role": "user", "content": "some words, " * 20_000}, {"role": "assistant", "content": "\x01🙂 " * 20_000})

    def use(self, choose: Chooser) -> float:
        limits, messages = (Limits(seconds=0.2), self.LONG) if choose.below(2) else (BRIEF, self.SHORT)
        chat = ChatTemplate({"default": template(choose)}, {"bos_token": "<s>"}, worker=self._worker)
        with suppress(RequestError):
            chat.render(messages, tools=[{"type": "function"}, *["", 1] * 10_000], limits=limits)
        # In the worker: a compilation, which renders too, and a rendering, each with the start of a process.
        more = apart.COMPILE_S + apart.MARGIN_S + 2 * START_S if chat.apart else PROBING.seconds
        return MARGIN_S + limits.seconds + more


class TokenizerTarget(HostileTarget):
    """A tokenizer.json: loaded, encodes a text and decodes it, at once and as a stream."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory(prefix="infd-fuzz-")

    def use(self, choose: Chooser) -> float:
        Path(self._directory.name, "tokenizer.json").write_bytes(tokenizer(choose))
        said = text(choose)
        try:
            found = Tokenizer.load(self._directory.name, self._worker)
        except CheckpointError:
            return MARGIN_S + START_S
        try:
            ids = found.encode(said)
        except RequestError:
            return MARGIN_S + 2 * START_S + apart.ENCODE_S
        except TextFailed:
            if not found.apart:
                raise
            return MARGIN_S + 2 * START_S + apart.ENCODE_S
        found.decode(ids)
        reply = Reply(found)
        reply.feed(ids[:64])
        reply.finish()
        return MARGIN_S + (2 * START_S + apart.ENCODE_S if found.apart else 0)

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


class SocketTarget(Target):
    """Raw bytes on a connection: no status is a 5xx but a documented 503, and the server continues.

    A final request follows the bytes and ends the answers; if the bytes swallow it, silence ends the wait.
    """

    noise = 60
    last: bytes

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._address = self._runner.run(self._start())

    @abstractmethod
    async def _start(self) -> str | tuple[str, int]:
        """Start the server; return its address."""

    def __call__(self, data: bytes) -> None:
        answer = self.answer(data)
        for line in answer.split(b"\r\n"):
            if line.startswith(b"HTTP/1.1 5"):
                assert line.startswith(b"HTTP/1.1 503"), answer

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def answer(self, data: bytes) -> bytes:
        """Send bytes on one connection; return all bytes received."""
        return self._runner.run(self._ask(data))

    async def _ask(self, data: bytes) -> bytes:
        family = socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET
        loop = asyncio.get_running_loop()
        with socket.socket(family) as client:
            client.setblocking(False)
            await loop.sock_connect(client, self._address)
            answer = bytearray()
            try:
                await loop.sock_sendall(client, data + self.last)
                async with asyncio.timeout(20):
                    while piece := await self._piece(client):
                        answer += piece
            except ConnectionError:
                pass  # refused while sending
            return bytes(answer)

    @staticmethod
    async def _piece(client: socket.socket) -> bytes:
        """Return the next bytes. After SILENCE_S the client closes its sending side."""
        coming = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(client, 65536))
        if not (await asyncio.wait([coming], timeout=SILENCE_S))[0]:
            with suppress(OSError):
                client.shutdown(socket.SHUT_WR)  # the server drops such a client
        return await coming


class Faults(logging.Handler):
    """Collects log records of level error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


class HttpTarget(SocketTarget):
    """A client of the endpoint: its bytes, how they are cut, and how it ends the connection.

    The first byte selects the end, and whether the bytes after the second are sent unchanged or generate requests; the
    second selects the cuts.

    The client gets HTTP/1.1 without an internal error, an answer or the end within BOUND_S, and leaves nothing behind:
    no connection, ticket, task, byte of a body, object, or error in the log.
    """

    last = LAST
    BOUND_S = 20.0
    # Caches fill at first; a leak of an object a client soon exceeds that.
    ROUND = 2000
    GROWTH_OBJECTS = 5000

    def __init__(self) -> None:
        self.log = Faults()
        logging.getLogger().addHandler(self.log)
        self._clients = 0
        self._objects: Counter[str] | None = None
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        self._address = self._runner.run(self._start())

    async def _start(self) -> tuple[str, int]:
        self._endpoint = await self._stack.enter_async_context(serving())
        self._tasks = asyncio.all_tasks()
        host, port = self._endpoint.url.removeprefix("http://").split(":")
        return host, int(port)

    def close(self) -> None:
        super().close()
        logging.getLogger().removeHandler(self.log)

    def __call__(self, data: bytes) -> None:
        how, cutting, rest = (*data[:2], 0, 0)[0], (*data[:2], 0, 0)[1], data[2:]
        sent, ordinary = made(Chooser(rest)) if how & 0x80 else (rest, None)
        self._runner.run(self._run_client(cut(sent, cutting), how & 7, ordinary))
        assert not self.log.messages, self.log.messages
        self._clients += 1
        if self._clients % self.ROUND == 0:
            self._check_growth()

    def _check_growth(self) -> None:
        """Assert that the number of objects does not grow."""
        self._endpoint.executor.issued.clear()  # kept for other tests
        gc.collect()
        objects = Counter(type(each).__qualname__ for each in gc.get_objects())
        if self._objects is None:
            self._objects = objects
        grown = objects - self._objects
        assert grown.total() < self.GROWTH_OBJECTS, f"since the first {self.ROUND} clients: {grown.most_common(8)}"

    async def _run_client(self, pieces: list[bytes], ending: int, ordinary: int | None) -> None:
        """Run one client. ordinary: the number of answers that must arrive, whatever the cuts."""
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, self._address)
            try:
                async with asyncio.timeout(self.BOUND_S):
                    await self._send(client, pieces)
                    match ending:
                        case 0 | 1 | 2 | 3:
                            await self._send(client, [self.last])
                            said = await self._receive_all(client, patient=ordinary is not None)
                            found = statuses(said, cut_off=ordinary is None)
                            self._check(found)
                            assert ordinary is None or len(found) == ordinary + 1, (found, ordinary)
                        case 4 if ordinary is not None:
                            await self._send(client, [self.last[:5]])
                            client.shutdown(socket.SHUT_WR)
                            found = statuses(await self._receive_all(client, patient=True), cut_off=False)
                            self._check(found)
                            assert len(found) == ordinary + 1, (found, ordinary)
                            assert found[-1] == 400, found
                        case 4 | 5:
                            client.shutdown(socket.SHUT_WR)
                            self._check(statuses(await self._receive_all(client, patient=True), cut_off=True))
                        case 6:
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        case _:
                            await asyncio.sleep(0)
            except ConnectionError:
                assert ordinary is None or ending > 3, "an ordinary client met a reset"
        await self._wait_for_release()

    @staticmethod
    def _check(statuses: list[int]) -> None:
        assert not {status for status in statuses if status >= 500} - {501, 503, 505}, statuses

    @staticmethod
    async def _send(client: socket.socket, pieces: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        for piece in pieces:
            await loop.sock_sendall(client, piece)
            if len(pieces) > 1:
                for _ in range(3):  # lets the server, on the same loop, read the piece
                    await asyncio.sleep(0)

    async def _receive_all(self, client: socket.socket, *, patient: bool) -> bytes:
        """Return all bytes received. patient: the server must close by itself."""
        said, loop = bytearray(), asyncio.get_running_loop()
        while piece := await (loop.sock_recv(client, 65536) if patient else self._piece(client)):
            said += piece
        return bytes(said)

    async def _wait_for_release(self) -> None:
        """Wait until the server holds nothing of a disconnected client."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.BOUND_S):
                while self._traces():
                    await asyncio.sleep(0.0005)
        assert not self._traces(), self._traces()

    def _traces(self) -> dict[str, object]:
        service, engine = self._endpoint.server.service, self._endpoint.engine
        tasks = asyncio.all_tasks() - self._tasks
        status = engine.status()
        counts: dict[str, object] = {
            "connections": service.metrics.connections,
            "tasks": {task for task in tasks if task is not asyncio.current_task()},
            "tickets": len(engine.admission),
            "choices": engine.admission.unfinished,
            "running": status.running,
            "waiting": status.waiting,
            "queued tokens": engine.admission.budget.queued_tokens,
            "streams": list(service.streams),
            "bytes of bodies": service.bodies_bytes,
        }
        return {name: count for name, count in counts.items() if count}


class AdminTarget(SocketTarget):
    """Bytes on the admin socket: raw if the first is below 0x80; else it selects a verb, with generated arguments."""

    last = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    def __call__(self, data: bytes) -> None:
        if data and data[0] & 0x80:
            verb = VERBS[data[0] % len(VERBS)]
            choose = Chooser(data[1:])
            names = (*verb.arguments.__struct_fields__, "x", "wait", "abort", "hold", "weights", "kv_cache", "keep")
            said = mapping(choose, names).encode("utf-8", "surrogatepass")
            asked = f"{verb.method} {verb.path.replace('{id}', 'r')} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(said)}"
            data = asked.encode() + b"\r\n\r\n" + said
        super().__call__(data)

    async def _start(self) -> str:
        endpoint = await self._stack.enter_async_context(serving())
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="infd-fuzz-"))
        admin = AdminServer(AdminContext(endpoint.engine, "embedded", lambda: None, fixed()))
        await admin.start(Path(directory, "admin.sock"))
        self._stack.push_async_callback(admin.close)
        return str(Path(directory, "admin.sock"))


TARGETS: dict[str, Callable[[], Target]] = {
    "request": RequestTarget,
    "header": HeaderTarget,
    "stops": StopTarget,
    "markup": MarkupTarget,
    "template": TemplateTarget,
    "tokenizer": TokenizerTarget,
    "http": HttpTarget,
    "admin": AdminTarget,
}


def examples(target: str) -> list[bytes]:
    """Return initial inputs."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": ["a"], "logit_bias": {"3": 1}}
    match target:
        case "request":
            prompt = {"prompt": [[1, 2], [3]], "n": 2, "logprobs": 1, "temperature": 0.5, "seed": 1}
            bodies = [chat, prompt, {"prompt": "text"}, {"tokens": [1, 2]}]
            made = [bytes([i, 5, *range(40)]) for i in range(4)]
            return made + [bytes([0x80 + i]) + json.dumps(body).encode() for i, body in enumerate(bodies)]
        case "header":
            header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
            return [
                b"\x01" + json.dumps(header).encode() + b"\0" + bytes(8),
                b"\x02\x05012345",
                b"\x03\x03\x01\x02\x08\0",
            ]
        case "stops":
            return [b"the\xfeth\xff" + bytes(range(1, 60)), b"\xc3\xa9\xff\x00\xc3\x00\xa9"]
        case "markup":
            call = b'<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
            return [
                b"\x02<think>\nhm\n</think>\n\nyes " + call,
                b"\x41hm</think>" + call + call,
                b"\x83\x02\x04\x08a\x07\x07\x03",
                b'\x01<tool_call>{"arguments": {}, "name": "f"}</tool_call>',
            ]
        case "template":
            return [bytes((seed * 7 + n * step) % 256 for n in range(60)) for seed in range(8) for step in (11, 37)]
        case "tokenizer":
            return [bytes((seed * 5 + n * step) % 256 for n in range(40)) for seed in range(8) for step in (13, 41)]
        case "http":
            data = json.dumps(chat).encode()
            post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data)
            chunked = post.replace(b"Content-Length: %d" % len(data), b"Transfer-Encoding: chunked")
            gets = b"GET /v1/models/a/b HTTP/1.1\r\nHost: a\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
            sent = [post + data, chunked + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data), gets]
            plain = [
                bytes([ending, cutting]) + each for each in sent for ending in (0, 4, 6, 7) for cutting in (0, 1, 131)
            ]
            asked = [
                bytes([0, 0, target, 0, body, framing])
                for target in range(9)
                for body in range(len(BODIES))
                for framing in (0, 1)
            ]
            odd = [bytes([0, part, *range(number, number + 9)]) for part in range(1, 8) for number in range(12)]
            made = [bytes([0x80 + number % 8, number % 3]) + each for number, each in enumerate(asked + odd)]
            return plain + made
        case _:
            return [
                *(bytes([0x80 + number, 3, 0, *range(20)]) for number in range(len(VERBS))),
                b"GET /v1/status HTTP/1.1\r\nHost: a\r\n\r\n",
                b"POST /v1/requests/abc/abort HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
            ]
