"""The network for training: Qwen3's architecture in plain torch, with LoRA.

Tensors in checkpoints have transformers' names and shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

if TYPE_CHECKING:
    from collections.abc import Iterator


class Shape(Struct, frozen=True, kw_only=True):
    """The network's dimensions, which `config` writes to config.json."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    context: int = 2048
    theta: float = 10_000.0
    eps: float = 1e-6


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


class Linear(nn.Module):
    """A linear layer; `adapt` adds a LoRA."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.down: nn.Parameter | None = None
        self.up: nn.Parameter | None = None
        self._scale = 0.0

    def adapt(self, rank: int, alpha: float) -> None:
        """Freeze the weight and add a trainable LoRA of `rank`."""
        outputs, inputs = self.weight.shape
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self._scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight.to(x.dtype))
        if self.down is not None and self.up is not None:
            y = y + self._scale * linear(linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return y


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head)
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head)
        self.o_proj = Linear(shape.heads * shape.head, shape.hidden)
        self.q_norm = Norm(shape.head, shape.eps)
        self.k_norm = Norm(shape.head, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return [B, T, hidden] for x [B, T, hidden]; cos and sin are [T, head]."""
        batch, length, _ = x.shape
        size, groups = self._shape.head, self._shape.kv_heads
        heads = (batch, length, -1, size)
        q = _rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin) * size**-0.5
        k = _rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        # The heads of a group share keys, so their queries are stacked in one matrix. On a CPU this is faster than
        # torch's attention function.
        scores = torch.bmm(q.reshape(batch * groups, -1, size), k.reshape(batch * groups, length, size).mT)
        ahead = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        shares = (scores.view(batch * groups, -1, length, length) + ahead).softmax(-1).view_as(scores)
        y = torch.bmm(shares, v.reshape(batch * groups, length, size)).view(batch, -1, length, size)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.inner)
        self.up_proj = Linear(shape.hidden, shape.inner)
        self.down_proj = Linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    """A decoder from token ids to hidden states. The embedding table is also the output projection (`logits`)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        periods = shape.theta ** (torch.arange(0, shape.head, 2) / shape.head)
        angles = torch.arange(shape.context)[:, None] / periods
        self.register_buffer("_cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("_sin", torch.cat((angles.sin(), angles.sin()), -1), persistent=False)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return [B, T, hidden] for tokens [B, T]."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens).to(dtype)
        cos, sin = self._cos[:length].to(dtype), self._sin[:length].to(dtype)  # type: ignore[index]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def adapt(self, rank: int, alpha: float) -> list[nn.Parameter]:
        """Freeze all weights, add a LoRA to every linear layer, and return the parameters of all LoRAs."""
        self.requires_grad_(False)
        thin: list[nn.Parameter] = []
        for module in self.modules():
            if isinstance(module, Linear):
                module.adapt(rank, alpha)
                assert module.down is not None
                assert module.up is not None
                thin += [module.down, module.up]
        return thin

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers' name, tensor) for a checkpoint, without the adapter."""
        for name, tensor in self.state_dict().items():
            if not name.endswith((".down", ".up")):
                yield f"model.{name}", tensor.to(torch.bfloat16).contiguous()

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT's name, tensor) for the adapter."""
        for name, tensor in self.state_dict().items():
            stem, _, kind = name.rpartition(".")
            if kind in {"down", "up"}:
                letter = "A" if kind == "down" else "B"
                yield f"base_model.model.model.{stem}.lora_{letter}.weight", tensor.to(torch.bfloat16).contiguous()


def config(shape: Shape, *, end: int, pad: int) -> dict[str, Any]:
    """Return the content of config.json for `shape`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.context,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
