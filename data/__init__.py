"""Text source -> tokenizer -> memory-mapped token shards -> batches."""
