"""What a checkpoint says of how hidden states become embeddings, labels and scores: sentence-transformers' files."""

from infd.pooling.configured import configured
from infd.pooling.reading import ENCODERS, M3_FILES, read, weight_files
from infd.pooling.settings import Dense, PoolingSettings

__all__ = ["ENCODERS", "M3_FILES", "Dense", "PoolingSettings", "configured", "read", "weight_files"]
