"""What a checkpoint says of how hidden states become embeddings, labels and scores: sentence-transformers' files."""

from infd.pooling.configured import configured
from infd.pooling.reading import ENCODERS, dense_files, read
from infd.pooling.settings import Dense, PoolingSettings

__all__ = ["ENCODERS", "Dense", "PoolingSettings", "configured", "dense_files", "read"]
