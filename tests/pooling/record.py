"""Record what sentence-transformers reads from directories that it wrote, and from files of older releases.

    python -m tests.pooling.record

needs sentence-transformers, which no test needs: tests/pooling/test_reading.py reads `recorded.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RECORDED = Path(__file__).parent / "recorded.json"
HIDDEN = 8


def main() -> None:
    import sentence_transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models
    from torch import nn
    from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

    recorded: dict[str, Any] = {"version": sentence_transformers.__version__, "cases": {}}
    sizes = {
        "vocab_size": 5,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 24,
    }

    def base(directory: Path, model: Any) -> Path:
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(directory)
        model.save_pretrained(directory)
        return directory

    def keep(name: str, directory: Path, read: dict[str, Any]) -> None:
        files = {
            str(path.relative_to(directory)): path.read_text()
            for path in sorted(directory.rglob("*.json"))
            if path.name != "tokenizer.json"
        }
        recorded["cases"][name] = {"files": files, "read": read}

    def embedder(directory: Path) -> dict[str, Any]:
        model = SentenceTransformer(str(directory), device="cpu")
        modules = list(model)
        pooling = next(module for module in modules if isinstance(module, Pooling))
        return {
            "pooling": pooling.pooling_mode,
            "include_prompt": pooling.include_prompt,
            "normalize": any(isinstance(module, Normalize) for module in modules),
            "denses": [
                [each.in_features, each.out_features, each.bias, type(each.activation_function).__name__]
                for each in modules
                if isinstance(each, Dense)
            ],
            "dimensions": model.get_embedding_dimension(),
            "prompts": model.prompts,
            "default_prompt": model.default_prompt_name,
            "similarity": str(model.similarity_fn_name),
            "max_tokens": model.max_seq_length,
        }

    written: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "mean": ([Pooling(HIDDEN, "mean"), Normalize()], {}),
        "cls": ([Pooling(HIDDEN, "cls")], {"similarity_fn_name": "dot"}),
        "lasttoken": ([Pooling(HIDDEN, "lasttoken")], {"similarity_fn_name": "euclidean"}),
        "max": ([Pooling(HIDDEN, "max")], {"similarity_fn_name": "manhattan"}),
        "weightedmean": ([Pooling(HIDDEN, "weightedmean")], {}),
        "mean_sqrt_len_tokens": ([Pooling(HIDDEN, "mean_sqrt_len_tokens")], {}),
        "prompts": (
            [Pooling(HIDDEN, "mean", include_prompt=False)],
            {"prompts": {"query": "query: ", "sts": "s: "}, "default_prompt_name": "sts"},
        ),
        "denses": (
            [
                Pooling(HIDDEN, "mean"),
                Dense(HIDDEN, 6, activation_function=nn.Tanh()),
                Dense(6, 4, bias=False, activation_function=nn.Identity()),
                Normalize(),
            ],
            {},
        ),
    }
    older = {
        "1_Pooling/config.json": {
            "word_embedding_dimension": HIDDEN,
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True},
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
    }
    with TemporaryDirectory() as temporary:
        for name, (modules, options) in written.items():
            plain = base(Path(temporary) / f"{name}-base", BertModel(BertConfig(**sizes)))
            model = SentenceTransformer(modules=[Transformer(str(plain)), *modules], device="cpu", **options)
            model.save(str(saved := Path(temporary) / name))
            keep(name, saved, embedder(saved))
        for name, files in {"older": older, "none": {}}.items():
            directory = base(Path(temporary) / name, BertModel(BertConfig(**sizes)))
            for file, content in files.items():
                (directory / file).parent.mkdir(exist_ok=True)
                (directory / file).write_text(json.dumps(content))
            keep(name, directory, embedder(directory))
        scorers = {"pairs": (1, None), "pairs-logits": (1, nn.Identity()), "three": (3, nn.Softmax())}
        for name, (labels, activation) in scorers.items():
            head = BertForSequenceClassification(BertConfig(**sizes, num_labels=labels))
            plain = base(Path(temporary) / f"{name}-base", head)
            model = CrossEncoder(str(plain), activation_fn=activation, device="cpu")
            model.save_pretrained(str(saved := Path(temporary) / name))
            read = CrossEncoder(str(saved), device="cpu")
            keep(name, saved, {"labels": read.num_labels, "activation": type(read.activation_fn).__name__})
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
