"""Studies of training a part of the parameters."""
