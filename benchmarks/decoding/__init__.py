"""Rollout engines beside others: the models and completions of ``benchmarks/engine.py``, and who decodes them."""
