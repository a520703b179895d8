"""Models of other front ends within a budget; see docs/how_to/front_ends.md."""
