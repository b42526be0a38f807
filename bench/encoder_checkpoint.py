"""Write an encoder for measurements, with the tokenizer of all-MiniLM: bge-base's shape with random weights, or a
cross-encoder.

infd pull all-minilm-l6-v2
python -P bench/encoder_checkpoint.py ALL_MINILM DIR                      BERT, 12 layers of 768: 0.4 GB; pools the
                                                                          first token, as bge-base does
python -P bench/encoder_checkpoint.py ALL_MINILM DIR --mean               the same, but pools the mean over tokens
python -P bench/encoder_checkpoint.py ALL_MINILM DIR --cross-encoder      all-MiniLM's layers beneath a random head:
                                                                          the shape of ms-marco-MiniLM-L6
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

# The files of sentence-transformers' embedding models, which a cross-encoder has none of.
EMBEDDING = ("modules.json", "config_sentence_transformers.json", "1_Pooling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--cross-encoder", action="store_true")
    parser.add_argument("--mean", action="store_true")
    arguments = parser.parse_args()
    if arguments.cross_encoder:
        _cross_encoder(arguments.source, arguments.target)
    else:
        _base(arguments.source, arguments.target, mean=arguments.mean)


def _cross_encoder(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("config.json", "*.safetensors", "*.onnx", *EMBEDDING)
    shutil.copytree(source, target, ignore=ignored)
    torch.manual_seed(0)
    BertForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32).save_pretrained(target)


def _base(source: Path, target: Path, *, mean: bool) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors", "*.onnx"))
    shutil.copytree(source / "1_Pooling", target / "1_Pooling", dirs_exist_ok=True)
    torch.manual_seed(0)
    config = BertConfig(architectures=["BertModel"])
    BertModel(config).save_pretrained(target)
    (target / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    pooling = target / "1_Pooling" / "config.json"
    settings = json.loads(pooling.read_text()) | {"word_embedding_dimension": config.hidden_size}
    settings |= {"pooling_mode_cls_token": not mean, "pooling_mode_mean_tokens": mean}
    pooling.write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    main()
