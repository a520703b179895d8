"""What a user calls, and what they get."""
