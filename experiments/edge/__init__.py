"""Planned steps on phones and boards: `python -m experiments.edge.iree`."""
