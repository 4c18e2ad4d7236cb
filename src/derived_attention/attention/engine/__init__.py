"""What fast forms share: blocks and tiles of scores, pooling, filters, Triton's helpers."""
