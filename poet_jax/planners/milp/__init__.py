"""The mixed-integer program, and the search for plans and bounds with it."""
