"""Write an encoder as DIR/plain.onnx (for OpenVINO) and as DIR/model.onnx, with ONNX Runtime's fused layers.

    python -P bench/encoder_onnx.py DIR

Needs torch, transformers, onnx, onnxruntime and sympy. -P: `kernels` is a package that transformers looks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions
from transformers import AutoModel


class States(torch.nn.Module):
    """The encoder's last hidden states alone."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        states: torch.Tensor = self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state
        return states


def main() -> None:
    directory = Path(sys.argv[1])
    encoder = AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = tuple(torch.ones((2, 8), dtype=torch.int64) for _ in names)
    plain = directory / "plain.onnx"
    torch.onnx.export(
        States(encoder),
        inputs,
        plain,
        dynamo=False,
        input_names=list(names),
        output_names=["states"],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, "states")},
        opset_version=17,
    )
    config = encoder.config
    fused = optimizer.optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    print(fused.get_fused_operator_statistics())
    fused.save_model_to_file(str(directory / "model.onnx"))


if __name__ == "__main__":
    main()
