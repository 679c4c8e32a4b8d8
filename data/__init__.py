"""Text source -> tokenizer -> memory-mapped token shards -> batches."""

from data.batches import TokenBatches, document_starts, fixed_windows
from data.config import DataConfig, check_tokenizer
from data.dataset import Dataset, open_dataset
from data.prefetch import Batch, Prefetcher
from data.tokenizer import build_tokenizer, tokenizer_from_state, tokenizer_state

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
    "Prefetcher",
    "TokenBatches",
    "build_tokenizer",
    "check_tokenizer",
    "document_starts",
    "fixed_windows",
    "open_dataset",
    "tokenizer_from_state",
    "tokenizer_state",
]
