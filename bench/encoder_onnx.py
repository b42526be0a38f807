"""Write an encoder as DIR/plain.onnx (for OpenVINO) and as DIR/model.onnx, with ONNX Runtime's fused layers.

    python -P bench/encoder_onnx.py DIR

A cross-encoder's graphs give its logits, another encoder's its last hidden states. Needs
torch, transformers, onnx, onnxruntime and sympy. -P: `kernels` is a package that transformers looks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification


class Output(torch.nn.Module):
    """One output of an encoder alone, by name."""

    def __init__(self, encoder: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.name = name

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        )[self.name]
        return output


def main() -> None:
    directory = Path(sys.argv[1])
    scores = AutoConfig.from_pretrained(directory).architectures[0].endswith("ForSequenceClassification")
    kind = AutoModelForSequenceClassification if scores else AutoModel
    encoder = kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = tuple(torch.ones((2, 8), dtype=torch.int64) for _ in names)
    plain = directory / "plain.onnx"
    torch.onnx.export(
        Output(encoder, "logits" if scores else "last_hidden_state"),
        inputs,
        plain,
        dynamo=False,
        input_names=list(names),
        output_names=["output"],
        dynamic_axes={
            **{name: {0: "texts", 1: "tokens"} for name in names},
            "output": {0: "texts"} if scores else {0: "texts", 1: "tokens"},
        },
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
