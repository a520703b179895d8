"""Passes for steps that train a part: less work where less is wanted."""
