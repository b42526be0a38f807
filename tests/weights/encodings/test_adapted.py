"""Adapters on encoded matrices: PEFT's numbers on the decoded weights, whatever form keeps them."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from infd.kernels.select import CANDIDATES, EXACT, insisting, quantized, select
from infd.models.parameter import Matrix
from infd.weights.encodings.gguf import GROUPS
from tests.adapters.making import make as make_adapter
from tests.adapters.test_parity import Bench, text
from tests.gguf.writing import TYPES, write
from tests.kernels.paging import CPU
from tests.tiny import make
from tests.weights.encodings.fixtures import NAMES, WRITTEN, expected, unpacked
from tests.weights.encodings.test_inputs import EMULATED
from tests.weights.encodings.test_serving import all_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from peft import PeftModel
    from torch import Tensor

    from infd.kernels.select import Candidate

pytestmark = pytest.mark.usefixtures("built")

CLOSE = 2e-4
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
# Inputs that a scheme rounds are compared apart: test_an_adapter_reads_inputs_that_are_not_rounded.
NATIVE = {**CANDIDATES, "packed": insisting("native", CANDIDATES)["packed"], "inputs": EXACT["inputs"]}
WHOLE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]


class Adapted(NamedTuple):
    """A checkpoint, the adapter's directory, and PEFT's model with the adapter on the checkpoint's decoded weights."""

    path: Path
    adapter: Path
    theirs: PeftModel

    def computed(self, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.inference_mode():
            model = self.theirs if dtype is torch.float32 else deepcopy(self.theirs).to(dtype)
            return model(torch.tensor([tokens])).logits[0].float()


def adapted(path: Path, directory: Path, **settings: Any) -> Adapted:
    directory.mkdir(exist_ok=True)
    theirs: Any = make_adapter(unpacked(path, directory / "plain"), directory / "adapter", **settings)
    return Adapted(path, directory / "adapter", theirs)


def ours(
    case: Adapted, candidates: Mapping[str, Sequence[Candidate]], tokens: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Bench]:
    """Return the logits of tokens with the adapter, computed in two chunks beside a sequence without it."""
    bench = Bench(case.path, CPU, select(CPU, dtype, candidates), dtype)
    bench.hold(1, case.adapter)
    driver = bench.driver()
    told, plain = driver.start(tokens, slot=1), driver.start(tokens)
    parts = [driver.step((told, count), (plain, count))[0] for count in (15, len(tokens) - 15)]
    return torch.cat(parts).float(), bench


def assert_adapted(case: Adapted, tokens: list[int]) -> None:
    """Compare decoded weights with PEFT in float32; kept ones within twice bfloat16's distance from it."""
    want = case.computed(tokens)
    exact, _ = ours(case, {**CANDIDATES, **EXACT}, tokens)
    assert (exact - want).abs().max() < CLOSE * max(1, want.abs().max().item() / 10), case.path.name
    near = 2 * (case.computed(tokens, torch.bfloat16) - want).norm()
    for dtype in (torch.float32, torch.bfloat16):
        found, _ = ours(case, NATIVE, tokens, dtype)
        assert (found - want).norm() <= near, (case.path.name, dtype)


def test_an_adapter_on_blocks_of_gguf_equals_pefts_on_the_decoded_weights(tmp_path: Path) -> None:
    """Rows of q and k that the file interleaves, types that differ by matrix, the embedding and the head."""
    path = write(
        make("llama", tmp_path / "made", **WIDE),
        tmp_path / "model.gguf",
        TYPES.Q4_K,
        others={"v_proj": TYPES.Q6_K, "lm_head": TYPES.Q6_K},
    )
    case = adapted(path, tmp_path, target_modules=WHOLE)
    assert_adapted(case, text(1))
    found, bench = ours(case, NATIVE, text(1))
    assert all(each.kept for each in bench.model.parameters if isinstance(each, Matrix))
    with case.theirs.disable_adapter():
        assert (found - case.computed(text(1))).norm() > 0.2 * found.norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(6))
def test_an_adapter_on_each_form_equals_pefts_on_the_decoded_weights(part: int, tmp_path: Path) -> None:
    cases = [*((name, None) for name in NAMES), *(("model.gguf", kind) for kind in (*GROUPS, "F16", "BF16"))]
    made = make("qwen3-tied", tmp_path / "made", **WIDE)
    for index, (name, kind) in enumerate(cases[part::6]):
        path, tokens = WRITTEN / name, text(2)
        if kind is None:
            tokens = expected(name).tokens
        else:
            path = write(made, tmp_path / f"{kind}.gguf", TYPES[kind])
        assert_adapted(adapted(path, tmp_path / str(index)), tokens)


@pytest.mark.exhaustive
def test_an_adapter_on_weights_quantized_while_loading_equals_pefts_on_the_decoded_weights(tmp_path: Path) -> None:
    """Plain weights and GGUF's; weights that GGUF has in as many bits are kept, others are quantized anew."""
    plain = make("llama", tmp_path / "made", **WIDE)
    files = [plain, *(write(plain, tmp_path / f"{kind}.gguf", TYPES[kind]) for kind in ("Q4_0", "Q8_0", "Q4_K"))]
    for number, path in enumerate(files):
        case = adapted(path, tmp_path / str(number))
        stored = case.theirs.get_base_model().state_dict()
        for how in ("int8", "int4", "mxfp4", "fp8"):
            dtype = torch.bfloat16 if how == "fp8" else torch.float32
            found, bench = ours(case, {**quantized(how), "inputs": EXACT["inputs"]}, text(1), dtype)
            changed = 0
            for parameter in bench.model.parameters:
                if not isinstance(parameter, Matrix):
                    continue
                for source in parameter.sources:
                    module, rows = source.name.removesuffix(".weight"), all_rows(parameter).float()
                    name = next(each for each in (f"{module}.base_layer.weight", source.name) if each in stored)
                    ours_rows = rows[source.row : source.row + source.shape[0]]
                    changed += not stored[name].equal(ours_rows)
                    stored[name].copy_(ours_rows)
            assert changed or path is not plain
            want = case.computed(text(1))
            near = (case.computed(text(1), torch.bfloat16) - want).norm()
            assert (found - want).norm() <= 2 * near, (path.name, how)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(EMULATED.keys() - {"ct-mixed"}))  # whose packed layers PEFT cannot wrap
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_reads_inputs_that_are_not_rounded(name: str, tmp_path: Path) -> None:
    """As PEFT's does beside transformers' emulation of the checkpoint's scheme: the base layer alone rounds."""
    from peft import PeftModel

    case, tokens = adapted(WRITTEN / name, tmp_path), expected(name).tokens
    unrounded = case.computed(tokens)
    emulated: Any = AutoModelForCausalLM.from_pretrained(WRITTEN / name, dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(emulated, str(case.adapter))
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens])).logits[0]
    found, _ = ours(case, insisting("reference", CANDIDATES), tokens)
    assert (found - want).norm() < (1.3 if EMULATED[name][1] else 1e-4) * (want - unrounded).norm()
