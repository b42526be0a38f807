"""The choice of implementations, and its reasons as reported to operators."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from infd.errors import DeviceMissing
from infd.kernels.ops import Selected
from infd.kernels.reference.attention import PagedAttention
from infd.kernels.reference.dense import Matrices
from infd.kernels.select import (
    CACHED,
    CANDIDATES,
    COMPRESSED,
    QUANTIZED,
    Candidate,
    Facts,
    insisting,
    quantized,
    select,
)
from infd.kernels.triton import presence

CPU = torch.device("cpu")


class FakeMatrices(Matrices):
    """Replaces a faster kernel."""


def fake(lacks, place=f"{__name__}:FakeMatrices"):
    """Return candidates with one more for `linear`, before the reference."""
    return {**CANDIDATES, "linear": (Candidate(name="fake", place=place, lacks=lacks), *CANDIDATES["linear"][-1:])}


def attention_of(candidates) -> Selected:
    """Return the implementation of attention on a CPU in bfloat16, as a row of the selection table."""
    ops = select(CPU, torch.bfloat16, candidates)
    ops.request("attention")
    return ops.selection[0]


def only_cuda(facts: Facts) -> str | None:
    return None if facts.device.type == "cuda" else f"runs on CUDA, not on {facts.device.type}"


def test_every_family_has_a_reference_that_runs_anywhere():
    ops = select(torch.device("meta"), torch.float32)  # a device that only the reference supports
    ops.request(*CANDIDATES)
    assert isinstance(ops.attention, PagedAttention)
    chosen = {row["family"]: row["chosen"] for row in ops.describe()}
    assert chosen == dict.fromkeys(CANDIDATES, "reference") | {"packed": "reference decoded"}


def test_a_family_no_model_asks_for_is_neither_chosen_nor_refused():
    ops = select(torch.device("meta"), torch.float32, {**CANDIDATES, "stack": ()})
    ops.request("norm", "rope")
    assert [row.family for row in ops.selection] == ["norm", "rope"]
    with pytest.raises(DeviceMissing, match="no stack kernel"):
        ops.request("stack")


def test_a_family_is_chosen_once_and_a_replacement_makes_no_choice():
    ops = select(CPU, torch.float32, fake(lambda facts: None))
    other = ops.replace(norm=ops.linear)
    assert other.linear is ops.linear
    assert other.norm is ops.linear
    assert [row.family for row in other.selection] == ["linear"]


def test_the_first_candidate_that_does_not_refuse_is_chosen():
    ops = select(CPU, torch.float32, fake(lambda facts: None))
    assert type(ops.linear) is FakeMatrices
    assert Selected("linear", "fake", {}) in ops.selection


def test_a_refusal_is_explained():
    ops = select(CPU, torch.float32, fake(only_cuda))
    assert type(ops.linear) is Matrices
    assert Selected("linear", "reference", {"fake": "runs on CUDA, not on cpu"}) in ops.selection


def test_a_refusal_may_depend_on_the_dtype():
    candidates = fake(lambda facts: None if facts.dtype is torch.bfloat16 else "bfloat16 only")
    assert type(select(CPU, torch.bfloat16, candidates).linear) is FakeMatrices
    assert type(select(CPU, torch.float32, candidates).linear) is Matrices


def test_a_refused_implementation_is_never_imported():
    select(CPU, torch.float32, fake(only_cuda, place="antigravity:fly")).request("linear")
    assert "antigravity" not in sys.modules


def test_where_all_refuse_the_error_gives_every_reason():
    candidates = {**CANDIDATES, "linear": fake(only_cuda)["linear"][:1]}
    with pytest.raises(DeviceMissing, match=r"no linear kernel runs on cpu in torch\.float32: fake: runs on CUDA"):
        select(CPU, torch.float32, candidates).request("linear")


@pytest.mark.parametrize("how", ["none", *QUANTIZED])
@pytest.mark.parametrize("vocabulary", ["none", *QUANTIZED])
def test_quantized_weights_are_a_choice_of_their_families(how, vocabulary):
    assert forms(how, vocabulary) == {"linear": how, "vocabulary": vocabulary, "table": vocabulary}


@pytest.mark.parametrize(("how", "vocabulary"), [("none", "none"), *((each, "int8") for each in QUANTIZED)])
def test_a_quantized_vocabulary_has_8_bits_by_default(how, vocabulary):
    assert forms(how, "auto") == {"linear": how, "vocabulary": vocabulary, "table": vocabulary}


def forms(how, vocabulary):
    """Return the quantization of the families that hold weights."""
    ops = select(CPU, torch.bfloat16, quantized(how, vocabulary))
    ops.request("linear", "vocabulary", "table")
    chosen = {row.family: row.chosen for row in ops.selection}
    forms = {family: name.partition(" ")[2] or "none" for family, name in chosen.items()}
    return {family: "none" if chosen[family] == COMPRESSED.name else form for family, form in forms.items()}


def test_without_a_quantizing_form_the_reasons_are_listed(monkeypatch):
    monkeypatch.setattr(presence, "find_spec", lambda _: None)
    with pytest.raises(
        DeviceMissing, match=r"no linear kernel runs on cuda .* native int8: runs on a CPU, not on cuda"
    ):
        select(torch.device("cuda"), torch.bfloat16, quantized("int8")).request("linear")


def test_a_cache_of_int8_is_a_choice_of_attention():
    candidates = {**CANDIDATES, **CACHED["int8"]}
    assert attention_of(candidates).chosen.endswith("int8")
    with pytest.raises(DeviceMissing, match=r"no attention kernel .* native int8: runs on a CPU, not on cuda"):
        select(torch.device("cuda"), torch.bfloat16, candidates).request("attention")


def test_an_fp8_cache_needs_a_gpu_with_fp8_conversion(monkeypatch):
    candidates = {**CANDIDATES, **CACHED["fp8"]}
    chosen = attention_of(candidates)
    refused = {"triton fp8": "runs on a GPU, not on cpu", "flashinfer fp8": "runs on a GPU, not on cpu"}
    assert (chosen.chosen, chosen.refused) == ("reference fp8", refused)
    monkeypatch.setattr(presence, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(
        DeviceMissing, match=r"triton fp8: needs .* 8\.9; this GPU has 8\.6; flashinfer fp8: .*; reference fp8"
    ):
        select(torch.device("cuda"), torch.bfloat16, candidates).request("attention")


def test_insisting_on_a_kernel_takes_those_of_its_name_for_other_caches_too():
    insisted = insisting("triton", {**CANDIDATES, **CACHED["fp8"]})
    assert [each.name for each in insisted["attention"]] == ["triton fp8"]


class Leaving(Matrices):
    """Replaces an implementation that delegates some cases."""

    def __init__(self):
        self.refused = {}


def test_cases_that_an_implementation_delegates_are_shown_to_operators():
    candidates = fake(only_cuda)
    candidates["linear"] = (candidates["linear"][0], *fake(lambda _: None, f"{__name__}:Leaving")["linear"])
    ops = select(CPU, torch.float32, candidates)
    ops.request("linear")
    told = next(row["refused"] for row in ops.describe() if row["family"] == "linear")
    assert told == {"fake": "runs on CUDA, not on cpu"}
    ops.linear.refused["leaving"] = "leaves rows of 3"
    assert told == {"fake": "runs on CUDA, not on cpu", "leaving": "leaves rows of 3"}


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("triton", "triton is not installed (the extra `cuda` brings it)"),
        ("capability", "needs compute capability 8.0; this GPU has 7.5"),
        ("compiler", "triton needs a C compiler; there is none of cc, gcc, clang"),
        ("header", "triton needs Python.h, which comes with Python's development package"),
        ("nothing", None),
    ],
)
def test_missing_features_of_triton_are_named(monkeypatch, tmp_path, lacking, reason):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(presence, "find_spec", lambda _: None if lacking == "triton" else object())
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda _: (7, 5) if lacking == "capability" else presence.OLDEST
    )
    monkeypatch.setattr(presence.shutil, "which", lambda _: None if lacking == "compiler" else "/usr/bin/cc")
    include = tmp_path / "elsewhere" if lacking == "header" else tmp_path
    monkeypatch.setattr(presence.sysconfig, "get_paths", lambda scheme: {"include": str(include)})
    assert presence.why_not(torch.device("cuda")) == reason


@pytest.mark.parametrize(("scheme", "taken"), [("posix_local", "posix_prefix"), ("venv", "venv")])
def test_pythons_headers_are_looked_for_where_triton_does(monkeypatch, tmp_path, scheme, taken):
    (tmp_path / "Python.h").touch()
    asked = []
    monkeypatch.setattr(presence.shutil, "which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr(presence.sysconfig, "get_default_scheme", lambda: scheme)
    monkeypatch.setattr(
        presence.sysconfig, "get_paths", lambda scheme: asked.append(scheme) or {"include": str(tmp_path)}
    )
    assert presence.without_compiler() is None
    assert asked == [taken]


@pytest.mark.parametrize(
    ("shared", "head", "dtype", "reason"),
    [
        (99, 512, torch.float32, None),
        (99, 576, torch.bfloat16, None),
        (99, 576, torch.float32, "heads of 576 float32 want 194 KiB of shared memory; this GPU has 99"),
        (227, 576, torch.float32, None),
        (48, 512, torch.bfloat16, "heads of 512 bfloat16 want 49 KiB of shared memory; this GPU has 48"),
        (48, None, torch.bfloat16, None),
    ],
)
def test_heads_that_a_gpu_cannot_hold_are_refused_by_name_and_go_to_another_kernel(
    monkeypatch, shared, head, dtype, reason
):
    monkeypatch.setattr(presence, "why_not", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = SimpleNamespace(name="GPU", multi_processor_count=8, shared_memory_per_block_optin=1024 * shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**vars(there), major=8, minor=9))
    facts = Facts(device=torch.device("cuda", 0), dtype=dtype, head=head)
    triton = next(each for each in CANDIDATES["attention"] if each.name == "triton")
    assert triton.refuses(facts) == reason


def test_attention_is_chosen_for_the_heads_of_the_model():
    asked = []
    candidates = {**CANDIDATES, "attention": [replace(CANDIDATES["attention"][-1], lacks=asked.append)]}
    select(CPU, torch.float32, candidates, head=96).request("attention")
    assert [facts.head for facts in asked] == [96]


def test_triton_is_for_gpus():
    assert presence.why_not(CPU) == "runs on a GPU, not on cpu"


def test_a_library_that_cannot_compute_a_family_has_a_row_with_the_reason():
    row = next(each for each in CANDIDATES["span_attention"] if each.name == "flashinfer")
    gpu = Facts(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert row.refuses(gpu) == "it has no biases by distance, and windows on one side only"
    ops = select(CPU, torch.float16)
    ops.request("span_attention")
    assert ops.describe()[0]["refused"]["flashinfer"] == "runs on a GPU, not on cpu"
    assert all(each.refuses(gpu) for each in insisting("flashinfer", CANDIDATES)["span_attention"] if not each.place)
