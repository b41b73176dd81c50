"""From raw text to shards: documents, tokenizer, instances, masks and the on-disk format (no torch)."""
