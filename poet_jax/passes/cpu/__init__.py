"""Forms of operations that XLA's CPU backend computes fast."""
