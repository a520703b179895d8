"""The questions of the POET paper, asked of traced models."""
