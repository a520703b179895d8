"""Programs that measure poet_jax; run one with `python -m experiments.NAME`."""
