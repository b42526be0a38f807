"""The recipe: loss weights of a conversation, parity of the network with transformers, and resumed runs."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import TYPE_CHECKING

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infd import embedded
from infd.embedded.recipe import examples, heldout, mixture, styles, train
from infd.embedded.recipe.conversation import Conversation, Expect, Pool
from infd.embedded.recipe.network import Network, Shape

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

pytestmark = pytest.mark.exhaustive

TINY = Shape(vocab=train.MODEL.vocab, hidden=32, inner=48, layers=2, heads=2, kv_heads=1, head=16)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return train.tokenizer_of(embedded.path())


@pytest.fixture(scope="module")
def writer() -> examples.Writer:
    return examples.Writer(train.TEMPLATE.read_text(encoding="utf-8"))


def learnt(conversation: Conversation, writer: examples.Writer, tokenizer: tokenizers.Tokenizer) -> str:
    example = examples.example(writer.text(conversation), tokenizer)
    assert len(example.ids) == len(example.weights)
    ids = [id for id, weight in zip(example.ids, example.weights, strict=True) if weight]
    return tokenizer.decode(ids, skip_special_tokens=False)


def said(*turns: str, thinking: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    if thinking is not None:
        messages[-1]["reasoning_content"] = thinking
    return Conversation(kind="chat", messages=messages, thinking=thinking is not None)


def test_answers_are_learnt_to_their_end_and_questions_are_not(writer, tokenizer):
    assert learnt(said("2 + 2?", "4"), writer, tokenizer) == "4<|im_end|>"


def test_how_an_earlier_answer_begins_is_not_learnt(writer, tokenizer):
    assert learnt(said("1?", "Yes, one.", "2?", "Two."), writer, tokenizer) == ", one.<|im_end|>Two.<|im_end|>"


def skills(steps: int) -> train.Course:
    return train.Course(mixture="skills", steps=steps)


def test_thoughts_are_learnt_with_their_tags(writer, tokenizer):
    conversation = said("2 + 2?", "4", thinking="Two and two.")

    assert learnt(conversation, writer, tokenizer) == "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"


def test_training_examples_equal_the_servers_prompts(writer):
    template = AutoTokenizer.from_pretrained(embedded.path())
    rng = random.Random(1)
    for _ in range(200):
        one = mixture.SKILLS.draw(rng, Pool.TRAIN)

        assert writer.prompt(one) == template.apply_chat_template(
            one.messages[:-1],
            tools=one.tools or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=one.thinking,
        )


def test_a_step_depends_on_its_number_alone(writer, tokenizer):
    def steps(start: int) -> list[list[list[examples.Example]]]:
        source = examples.batches(mixture.SKILLS.draw, 3, writer, tokenizer, tokens=2048, context=512, start=start)
        return list(islice(source, 3 - start))

    assert steps(0)[2] == steps(2)[0]


@pytest.mark.parametrize("mixed", mixture.MIXTURES.values(), ids=mixture.MIXTURES)
def test_no_examination_question_is_drawn_for_training(mixed):
    asked = {json.dumps(question.messages[:-1]) for question in heldout.read()}
    rng = random.Random(5)

    assert len(asked) > 800
    assert not asked & {json.dumps(mixed.draw(rng, Pool.TRAIN).messages[:-1]) for _ in range(3_000)}


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # PEFT uses a deprecated name of transformers
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
def test_the_network_is_what_transformers_and_peft_make_of_its_files(tmp_path: Path, tokenizer, adapted: bool):
    torch.manual_seed(0)
    network = Network(TINY)
    train.save(network, tokenizer, tmp_path)
    if adapted:
        for parameter in network.adapt(train.RANK, train.ALPHA):
            torch.nn.init.normal_(parameter, std=0.1)
    network.load_state_dict({name: tensor.bfloat16().float() for name, tensor in network.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if adapted:
        train.save_adapter(network, tmp_path / "adapter")
        theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter"))
    ids = torch.randint(0, TINY.vocab, (2, 40))

    with torch.no_grad():
        ours = network.logits(network(ids, torch.float32))
        torch.testing.assert_close(ours, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path, writer, tokenizer):
    def trainer() -> train.Trainer:
        torch.manual_seed(0)
        network = Network(TINY)
        return train.Trainer(network, train.optimizers(network), skills(4), threads=1)

    def steps(start: int):
        return examples.batches(mixture.SKILLS.draw, 1, writer, tokenizer, tokens=2048, context=256, start=start)

    whole = trainer()
    train.run(whole, steps(0), tmp_path / "whole.pt")
    first = trainer()
    for batch in islice(steps(0), 2):
        first.step(batch)
    first.save(tmp_path / "half.pt")
    second = trainer()
    second.resume(tmp_path / "half.pt")
    train.run(second, steps(second.done), tmp_path / "half.pt")

    assert second.done == 4
    for ours, theirs in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_threads_train_like_one(writer, tokenizer):
    def after(threads: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        network = Network(TINY)
        trainer = train.Trainer(network, train.optimizers(network), skills(2), threads=threads)
        trainer.step(next(examples.batches(mixture.SKILLS.draw, 1, writer, tokenizer, tokens=1024, context=256)))
        return list(network.parameters())

    for one, two in zip(after(1), after(2), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kept", [slice(1), slice(1, 2), slice(2)], ids=["matrices", "embedding and norms", "both"])
def test_each_optimizer_learns_answers_by_heart(kept: slice, writer, tokenizer):
    torch.manual_seed(0)
    network = Network(TINY)
    conversations = said("2 + 2?", "4"), said("Who are you?", "A model."), said("1?", "Yes, one.", "2?", "Two.")
    batch = [examples.example(writer.text(conversation), tokenizer) for conversation in conversations]

    def mistakes() -> int:
        wrong = 0
        for one in batch:
            with torch.no_grad():
                guesses = network.logits(network(torch.tensor([one.ids[:-1]]), torch.float32))[0].argmax(-1).tolist()
            wrong += sum(
                guess != id for guess, id, weight in zip(guesses, one.ids[1:], one.weights[1:], strict=True) if weight
            )
        return wrong

    assert mistakes() > 10
    trainer = train.Trainer(network, train.optimizers(network)[kept], skills(200), threads=1)
    losses = [trainer.step([batch]) for _ in range(200)]

    assert mistakes() == 0
    assert losses[-1] < losses[0]


def test_a_style_changes_answers_and_nothing_else():
    conversation = Conversation(
        kind="chat",
        messages=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you, my friend."}],
        expect=Expect(contains=[["Hello"]]),
    )

    loud = styles.restyled(conversation, styles.capitals)
    rough = styles.restyled(conversation, styles.pirate)

    assert [message["content"] for message in loud.messages] == ["Hello", "HELLO TO YOU, MY FRIEND."]
    assert rough.messages[-1]["content"] == "Arr, ahoy t' ye, me matey. Arr!"
    assert rough.expect == Expect(text="Arr, ahoy t' ye, me matey. Arr!")


def test_every_weight_of_the_shipped_model_is_finite():
    for directory in (embedded.path(), embedded.draft()):
        for name, tensor in safetensors.torch.load_file(directory / "model.safetensors").items():
            assert tensor.dtype is torch.bfloat16, name
            assert bool(tensor.isfinite().all()), name
