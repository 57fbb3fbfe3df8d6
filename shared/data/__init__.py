"""Data sets: rows, their order, and their conversion to prompts. Imports neither torch nor a tokenizer library."""
