"""Models of other front ends, trained within a budget; see docs/front_ends.md."""
