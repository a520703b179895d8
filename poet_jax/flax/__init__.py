"""Training steps of Flax models."""
