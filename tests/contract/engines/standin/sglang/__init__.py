"""Stand-in for SGLang: ``python -m sglang.launch_server`` with its HTTP contract; see ``launch_server``."""

__version__ = "0.5.23"
