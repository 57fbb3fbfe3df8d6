"""The pieces of the benchmark of length bias."""
