"""Adapters on a daemon with the embedded model: requests with the `openai` package, changes with `infdctl`."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd import embedded
from tests import tiny
from tests.adapters.making import make
from tests.e2e.process import PATIENCE_S, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

openai = pytest.importorskip("openai")

RUN = "from infd.admin.ctl import main; main()"
PROMPT = [11, 42, 7, 99, 5, 63, 120, 8, 77, 31]
REAL = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "128", "--kv-cache-bytes", "4M")
REAL = (*REAL, "--set", "scheduler.step_tokens=64", "--set", "device.threads=1")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Two adapters of the embedded model beneath one root, and PEFT's results with them."""
    root = tmp_path_factory.mktemp("adapters")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"]
    return {
        "one": (root / "one", make(embedded.path(), root / "one", seed=1, r=8, target_modules=every)),
        "two": (root / "two", make(embedded.path(), root / "two", seed=2, r=3, use_rslora=True)),
    }


def client(daemon: Daemon) -> openai.AsyncOpenAI:
    host, port = daemon.address
    return openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def ctl(daemon: Daemon, *arguments: str) -> tuple[int, Any, str]:
    """Run infdctl; return exit code, JSON output and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, "--socket", str(daemon.admin_socket), *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


async def likelihoods(api: openai.AsyncOpenAI, model: str) -> list[float]:
    """Return the log-probability of each token of PROMPT but the first, from the model or adapter `name`."""
    answer = await api.completions.create(
        model=model, prompt=PROMPT, max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    told: Any = answer.choices[0].model_dump()["prompt_logprobs"]
    return [next(iter(each.values()))["logprob"] for each in told[1:]]


def expected(model: PreTrainedModel, *, alone: bool = False) -> list[float]:
    with torch.inference_mode():
        if alone:
            with model.disable_adapter():  # type: ignore[operator]
                logits = model(torch.tensor([PROMPT])).logits[0]
        else:
            logits = model(torch.tensor([PROMPT])).logits[0]
    scores = logits.log_softmax(-1)
    return [scores[place, token].item() for place, token in enumerate(PROMPT[1:])]


async def test_clients_choose_an_adapter_by_model_and_operators_change_them_meanwhile(
    start_daemon: Start, adapters: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    (one, with_one), (two, with_two) = adapters["one"], adapters["two"]
    daemon = start_daemon(*REAL, "--lora", f"one={one}", "--lora-root", str(one.parent)).ready()
    want = {"embedded": expected(with_one, alone=True), "one": expected(with_one), "two": expected(with_two)}
    assert max(abs(a - b) for a, b in zip(want["embedded"], want["one"], strict=True)) > 0.1
    async with client(daemon) as api:
        cards = {card.id: card.model_dump() async for card in await api.models.list()}
        assert {name: card["parent"] for name, card in cards.items()} == {"embedded": None, "one": "embedded"}
        assert cards["one"]["root"] == str(one)
        assert (await api.models.retrieve("one")).id == "one"

        for name in ("one", "embedded", "one"):
            assert await likelihoods(api, name) == pytest.approx(want[name], abs=1e-3)
        with pytest.raises(openai.NotFoundError, match="served: embedded, one"):
            await likelihoods(api, "two")

        code, said, err = ctl(daemon, "load-lora", "two", "two", "--wait")
        assert (code, said["changed"], said["rank"]) == (0, True, 3), err
        code, said, err = ctl(daemon, "load-lora", "two", "two")
        assert (code, said["changed"]) == (0, False), err
        names = ["one", "embedded", "two"] * 3
        told = await asyncio.gather(*(likelihoods(api, name) for name in names))
        for name, each in zip(names, told, strict=True):
            assert each == pytest.approx(want[name], abs=1e-3)

        chat = await api.chat.completions.create(
            model="two", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
        )
        assert {chunk.model async for chunk in chat} == {"two"}

        code, said, err = ctl(daemon, "load-lora", "one", str(two), "--in-place", "--wait", "--timeout", "30")
        assert (code, said["done"]) == (0, True), err
        assert await likelihoods(api, "one") == pytest.approx(want["two"], abs=1e-3)

        code, said, _ = ctl(daemon, "loras")
        assert {row["name"]: (row["state"], row["requests"]) for row in said["loras"]} == {
            "two": ("ready", 0),
            "one": ("ready", 0),
        }
        metrics = daemon.get("/metrics")[1].decode()
        assert 'infd_adapter_requests_total{adapter="two"' in metrics
        for name in ("one", "two", "two"):
            code, said, err = ctl(daemon, "unload-lora", name, "--wait")
            assert (code, said["done"]) == (0, True), err
        assert said["changed"] is False
        code, said, _ = ctl(daemon, "loras")
        assert (said["loras"], said["bytes"]) == ([], 0)
        with pytest.raises(openai.NotFoundError):
            await likelihoods(api, "one")
        assert await likelihoods(api, "embedded") == pytest.approx(want["embedded"], abs=1e-3)
    audit = [json.loads(line) for line in daemon.log_text().splitlines() if "admin verb load-lora" in line]
    assert [(line["result"], line["verb"]) for line in audit] == [("done", "load-lora")] * 3
    assert '"name":"two"' in audit[0]["asked"]
    access = [json.loads(line) for line in daemon.log_text().splitlines() if '"adapter"' in line]
    assert {line["adapter"] for line in access} >= {"one", "two"}


@pytest.mark.exhaustive
async def test_adapters_on_experts_are_loaded_meanwhile_and_answer_beside_plain_requests(
    start_daemon: Start, tmp_path: Path
) -> None:
    """The stacked parameters, those of single experts, and attention alone; answers are PEFT's greedy ones."""
    checkpoint = tiny.make("qwen3-moe", tmp_path / "mixture", vocab_size=320)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).symlink_to(embedded.path() / name)
    root, experts = tmp_path / "adapters", ["experts.gate_up_proj", "experts.down_proj"]
    models = {
        "mixture": tiny.oracle(checkpoint),
        "stacked": make(checkpoint, root / "stacked", seed=1, target_modules=["q_proj"], target_parameters=experts),
        "single": make(checkpoint, root / "single", seed=2, target_modules=["gate_proj", "up_proj", "down_proj"]),
        "attention": make(checkpoint, root / "attention", seed=3, target_modules=["v_proj", "o_proj"]),
    }
    at_start = ("--lora", f"attention={root / 'attention'}", "--lora-root", str(root))
    daemon = start_daemon(*REAL, "--model", str(checkpoint), *at_start).ready()
    prompts = [[(17 * number + 5 * place) % 190 + 3 for place in range(4 + 5 * number)] for number in range(3)]
    expected = {
        (name, number): tiny.continuation(model, prompt, 8)
        for name, model in models.items()
        for number, prompt in enumerate(prompts)
    }
    answered = {name: [expected[name, number][0] for number in range(len(prompts))] for name in models}
    assert all(answered[one] != answered[other] for one, other in combinations(models, 2))

    async def answers(api: openai.AsyncOpenAI, names: list[str]) -> None:
        asked = [(name, number) for number in range(len(prompts)) for name in names]
        fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        fields["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        told = await asyncio.gather(
            *(api.completions.create(model=name, prompt=prompts[number], **fields) for name, number in asked)
        )
        for which, answer in zip(asked, told, strict=True):
            tokens, clear = expected[which]
            found: Any = answer.choices[0].model_dump()["token_ids"]
            assert found[:clear] == tokens[:clear], which
            assert clear >= 4, "most tokens are compared"

    async with client(daemon) as api:
        served = ["mixture", "attention"]
        for name in ("stacked", "single"):
            plain = asyncio.create_task(answers(api, served))
            code, said, err = await asyncio.to_thread(ctl, daemon, "load-lora", name, name, "--wait")
            assert (code, said["changed"]) == (0, True), err
            served.append(name)
            await plain
            await answers(api, served)


def bench(daemon: Daemon, *arguments: str) -> tuple[int, Any, str]:
    """Run `infdctl bench --json`; return exit code, its only run and standard error."""
    host, port = daemon.address
    code, record, err = ctl(daemon, "bench", "--url", f"http://{host}:{port}", "--output-tokens", "4", *arguments)
    return code, record["runs"][0], err


def asked_of(daemon: Daemon) -> dict[str, int]:
    """Return the requests that the daemon's adapters have had, by its metrics."""
    text = daemon.get("/metrics")[1].decode()
    found = re.findall(r'^infd_adapter_requests_total\{adapter="(\w+)".*\} ([0-9.]+)$', text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


@pytest.mark.exhaustive
def test_a_benchmarks_mix_reaches_the_adapters_that_it_names_as_often_as_it_says(
    start_daemon: Start, adapters: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    loras = [part for name, (path, _) in adapters.items() for part in ("--lora", f"{name}={path}")]
    daemon = start_daemon(*REAL, *loras).ready()
    mixed = ("--requests", "40", "--input-tokens", "16", "--seed", "1", "--warmup", "0", "--ignore-eos")
    mixed = (*mixed, "--extra-body", '{"skip_special_tokens": false}')  # so that each answer has text
    before = asked_of(daemon)
    code, run, err = bench(daemon, *mixed, "--lora-modules", "one=3", "two")
    drawn = {name: figures["completed"] for name, figures in run["models"].items()}
    asked = {name: count - before.get(name, 0) for name, count in asked_of(daemon).items()}

    assert (code, sum(drawn.values())) == (0, 40), err
    assert asked == drawn
    assert 22 <= drawn["one"] <= 37, "three quarters of them"
    assert {sample["model"] for sample in run["samples"]} == {"one", "two"}
    assert all(figures["output_tokens"] == 4 * figures["completed"] for figures in run["models"].values())

    even = ("--lora-modules", "one", "two", "embedded", "--lora-assignment", "round-robin")
    code, run, err = bench(daemon, *mixed, *even, "--endpoint", "completions")
    assert [run["models"][name]["completed"] for name in ("one", "two", "embedded")] == [14, 13, 13], err
    assert {name: count - asked[name] for name, count in asked_of(daemon).items()} == {"one": 14, "two": 13}

    code, run, err = bench(daemon, *mixed, "--lora-modules", "one", "three", "--lora-assignment", "round-robin")
    assert (code, run["models"]["one"]["completed"], run["models"]["three"]["failed"]) == (1, 20, 20)
    assert "'three'" in err


def test_a_forbidden_or_unloadable_adapter_is_refused_with_the_remedy(
    start_daemon: Start, adapters: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    one, _ = adapters["one"]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "out").symlink_to(one)
    daemon = start_daemon("--lora-root", str(tmp_path)).ready()

    for arguments, code, said in (
        (("load-lora", "a", "../one"), 1, "leads out of"),
        (("load-lora", "a", "out"), 1, "leads out of"),
        (("load-lora", "a", str(one)), 1, "leads out of"),
        (("load-lora", "a", "absent"), 1, "No such file"),
        (("load-lora", "a", "bad"), 1, "use_dora is True"),
        (("load-lora", "a b", "bad"), 1, "cannot be a name"),
        (("load-lora", "embedded", "bad"), 1, "the model's own name"),
        (("load-lora", "a"), 2, "Missing argument 'PATH'"),
        (("load-lora", "a", "bad", "--timeout", "1"), 2, "give both"),
        (("unload-lora", "a"), 0, "nothing is loaded as a"),
    ):
        got, _, err = ctl(daemon, *arguments)
        assert (got, said in err) == (code, True), (arguments, got, err)
    assert ctl(daemon, "loras")[1]["loras"] == []


def test_without_a_root_nothing_is_loaded_over_the_socket(start_daemon: Start) -> None:
    daemon = start_daemon("--model", str(embedded.path())).ready()  # by directory: no default lora.root
    code, _, err = ctl(daemon, "load-lora", "a", "a")

    assert code == 1
    assert "lora.root is not set" in err


def test_an_adapter_of_the_settings_that_does_not_fit_keeps_the_daemon_from_starting(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon("--lora", f"a={tmp_path}")

    assert daemon.exit_code() == 78
    assert "adapter_config.json" in daemon.log_text()
