"""Data sets: rows, their order, and how a row becomes a prompt. No torch and no tokenizer library."""
