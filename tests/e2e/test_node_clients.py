"""Clients from npm, against a daemon with random weights and 64k positions, whose sampler replays answers:
Claude Code's, and Node's `openai` package. `make test-clients` installs and runs them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from infd import embedded
from tests import tiny
from tests.e2e.process import Daemon

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "build" / "clients" / "node_modules"
CLAUDE = MODULES / ".bin" / "claude"
OPTIONS = ("--output-format", "json", "--allowedTools", "Read,Write", "--model", "claude-sonnet-4-5")
POSITIONS = 65_536

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not CLAUDE.exists(), reason="`make test-clients` installs the clients"),
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tiny.make(
        "qwen3", tmp_path / "random", vocab_size=3072, max_position_embeddings=POSITIONS, num_hidden_layers=1
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(embedded.path() / name, directory)
    return directory


class Replay:
    """A daemon that replays answers, one after another of a conversation."""

    def __init__(self, checkpoint: Path, directory: Path, *answers: str) -> None:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        end = tokenizer.token_to_id("<|im_end|>")
        script = directory / "answers.json"
        ids = [[*tokenizer.encode(answer, add_special_tokens=False).ids, end] for answer in answers]
        opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        script.write_text(json.dumps({"opening": opening, "answers": ids}))
        arguments = ["--device", "cpu", "--model", str(checkpoint), "--served-name", "claude-sonnet-4-5"]
        arguments += ["--max-model-len", str(POSITIONS)]
        self.daemon = Daemon(directory, arguments, {"INFD_REPLAY": str(script)}, module="tests.e2e.replaying")
        host, port = self.daemon.ready().address
        self.url = f"http://{host}:{port}"

    def requests(self) -> list[dict[str, Any]]:
        """Return the access log."""
        lines = self.daemon.log_text().rpartition("\n")[0].splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [record for record in records if "path" in record and "status" in record]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "daemon"
    made.mkdir()
    return made


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without this user's settings and keys."""
    return {"PATH": os.environ["PATH"], **variables}


def test_claude_code_reads_and_writes_files(checkpoint: Path, directory: Path, tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("The number is 56088.\n")
    replay = Replay(
        checkpoint,
        directory,
        "Let me read it.\n" + call("Read", file_path=str(work / "a.txt")),
        call("Write", file_path=str(work / "b.txt"), content="56,088\n"),
        "The number is 56088; b.txt has it too.",
    )
    try:
        ended = subprocess.run(
            [CLAUDE, "-p", "Copy the number in a.txt to b.txt.", *OPTIONS],
            cwd=work,
            env=environment(
                HOME=str(tmp_path),
                ANTHROPIC_BASE_URL=replay.url,
                ANTHROPIC_API_KEY="none",
                ANTHROPIC_SMALL_FAST_MODEL="claude-sonnet-4-5",
                CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                DISABLE_AUTOUPDATER="1",
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        result = json.loads(ended.stdout)
        assert not result["is_error"]
        assert result["num_turns"] == 3
        assert int(re.sub(r"\D", "", result["result"].partition(";")[0])) == 56088
        assert (work / "b.txt").read_text() == "56,088\n"
        asked = replay.requests()
        assert [record["path"] for record in asked].count("/v1/messages") >= 3
        # A probe whether the host is there may ask for a path of no API.
        assert [record for record in asked if record["status"] >= 400 and record["path"] != "/"] == []
    finally:
        replay.daemon.close()


SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = "claude-sonnet-4-5";
const parameters = {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"],
};
const said = {};
const runner = client.chat.completions.runTools({
  model, stream: true, messages: [{ role: "user", content: "123 x 456?" }],
  tools: [{ type: "function", function: {
    name: "multiply", parameters, parse: JSON.parse, function: ({ a, b }) => String(a * b),
  } }],
});
said.chat = await runner.finalContent();
said.ran = runner.messages.filter((message) => message.role === "tool").map((message) => message.content);

const tools = [{ type: "function", name: "multiply", parameters, strict: false }];
const stream = client.responses.stream({ model, input: "123 x 456?", tools });
const kinds = new Set();
for await (const event of stream) kinds.add(event.type);
const first = await stream.finalResponse();
const call = first.output.find((item) => item.type === "function_call");
const { a, b } = JSON.parse(call.arguments);
const second = await client.responses.create({
  model, tools, previous_response_id: first.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: String(a * b) }],
});
said.responses = second.output_text;
said.kinds = [...kinds];
said.models = (await client.models.list()).data.map((card) => card.id);
const empty = client.chat.completions.create({ model, messages: [] });
said.error = await empty.catch((error) => [error.status, error.param]);
process.stdout.write(JSON.stringify(said));
"""


def test_nodes_openai_package_runs_tools_over_both_apis(checkpoint: Path, directory: Path, tmp_path: Path):
    replay = Replay(checkpoint, directory, call("multiply", a=123, b=456), "It is 56088.")
    script = MODULES.parent / f"{tmp_path.name}.mjs"  # beside node_modules, where imports are found
    script.write_text(SCRIPT)
    try:
        ended = subprocess.run(
            ["node", str(script), replay.url],
            env=environment(HOME=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        said = json.loads(ended.stdout)
        assert (said["chat"], said["ran"], said["responses"]) == ("It is 56088.", ["56088"], "It is 56088.")
        assert {"response.function_call_arguments.done", "response.completed"} <= {*said["kinds"]}
        assert said["models"] == ["claude-sonnet-4-5"]
        assert said["error"] == [400, "messages"]
        assert [record["status"] for record in replay.requests() if record["status"] >= 400] == [400]
    finally:
        script.unlink()
        replay.daemon.close()
