"""The reasons for refusing FlashInfer's kernels, and the order of candidates."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.flashinfer import presence
from infd.kernels.select import CACHED, CANDIDATES, Facts, preferring

GPU = torch.device("cuda")


def facts(dtype: torch.dtype = torch.bfloat16, device: torch.device = GPU) -> Facts:
    return Facts(device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("package", "flashinfer is not installed (the extra `cuda` brings it)"),
        ("nvcc", "flashinfer needs nvcc to compile its kernels, or the package flashinfer-jit-cache"),
        ("ninja", "flashinfer needs ninja to compile its kernels; there is none in $PATH"),
        ("nothing", None),
        ("compilers, with the modules assembled", None),
    ],
)
def test_missing_features_of_flashinfer_are_named(monkeypatch, tmp_path, lacking, reason):
    assembled = lacking.endswith("assembled")
    known = {"flashinfer": lacking != "package", presence.ASSEMBLED: assembled}
    monkeypatch.setattr(presence, "find_spec", lambda name: object() if known[name] else None)
    monkeypatch.setattr(presence.shutil, "which", lambda name: None if name == lacking or assembled else f"/bin/{name}")
    monkeypatch.setattr(presence, "TOOLKIT", tmp_path / "nvcc")
    monkeypatch.setattr(presence.triton, "why_not", lambda device, oldest: None)
    assert presence.why_not(GPU) == reason
    (tmp_path / "nvcc").touch()
    if lacking == "nvcc":
        assert presence.why_not(GPU) is None


def test_features_that_triton_lacks_flashinfer_lacks_too(monkeypatch):
    monkeypatch.setattr(presence, "cannot_compile", lambda: None)
    monkeypatch.setattr(presence.triton, "why_not", lambda device, oldest: "wants another GPU")
    assert presence.why_not(GPU) == "wants another GPU"


def test_other_types_and_devices_are_refused():
    candidate = next(each for each in CANDIDATES["attention"] if each.name == "flashinfer")
    assert candidate.refuses(facts(torch.float32)) == "computes in bfloat16 and float16, not in float32"
    assert candidate.refuses(facts(device=torch.device("cpu"))) == "runs on a GPU, not on cpu"
    assert presence.why_not(torch.device("cpu")) == "runs only on NVIDIA's GPUs"


def test_a_preferred_implementation_comes_first_and_the_others_keep_their_order():
    preferred = preferring("flashinfer", CANDIDATES)
    names = {family: [each.name for each in some] for family, some in preferred.items()}
    for family in ("attention", "norm", "rope", "activation"):
        assert names[family] == ["flashinfer", "native", "triton", "reference"]
    assert names["linear"] == [each.name for each in CANDIDATES["linear"]]
    cached = preferring("flashinfer", CACHED["fp8"])["attention"]
    assert [each.name for each in cached] == ["flashinfer fp8", "triton fp8", "reference fp8"]


def test_an_fp8_cache_needs_a_gpu_with_fp8_conversion(monkeypatch):
    asked = []
    monkeypatch.setattr(presence, "cannot_compile", lambda: None)
    monkeypatch.setattr(presence.triton, "why_not", lambda device, oldest: asked.append(oldest))
    (float8,) = (each for each in CACHED["fp8"]["attention"] if each.called("flashinfer"))
    (plain,) = (each for each in CANDIDATES["attention"] if each.called("flashinfer"))
    assert float8.refuses(facts()) is None
    assert plain.refuses(facts()) is None
    assert asked == [presence.triton.FLOAT8, presence.triton.OLDEST]
