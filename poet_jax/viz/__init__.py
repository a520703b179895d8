"""A schedule to look at: tables, sentences, series and drawings."""
