"""Write an encoder of bge-base's shape with random weights, and the tokenizer of another encoder, for measurements.

infd pull all-minilm-l6-v2
python -P bench/encoder_checkpoint.py ALL_MINILM DIR      BERT, 12 layers of 768: 0.4 GB
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
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
