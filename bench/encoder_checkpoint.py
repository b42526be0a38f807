"""Write an encoder for measurements, with the tokenizer of all-MiniLM: bge-base's shape with random weights, or a
cross-encoder.

infd pull all-minilm-l6-v2
python -P bench/encoder_checkpoint.py ALL_MINILM DIR                      BERT, 12 layers of 768: 0.4 GB
python -P bench/encoder_checkpoint.py ALL_MINILM DIR --cross-encoder      all-MiniLM's layers beneath a random head:
                                                                          the shape of ms-marco-MiniLM-L6
"""

from __future__ import annotations

import argparse
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
    arguments = parser.parse_args()
    write = _cross_encoder if arguments.cross_encoder else _base
    write(arguments.source, arguments.target)


def _cross_encoder(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("config.json", "*.safetensors", "*.onnx", *EMBEDDING)
    shutil.copytree(source, target, ignore=ignored)
    torch.manual_seed(0)
    BertForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32).save_pretrained(target)


def _base(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors", "*.onnx"))
    shutil.copytree(source / "1_Pooling", target / "1_Pooling", dirs_exist_ok=True)
    torch.manual_seed(0)
    config = BertConfig(architectures=["BertModel"])
    BertModel(config).save_pretrained(target)
    (target / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": false}')
    pooling = target / "1_Pooling" / "config.json"
    width = '"word_embedding_dimension": '
    pooling.write_text(pooling.read_text().replace(f"{width}384", f"{width}{config.hidden_size}"))


if __name__ == "__main__":
    main()
