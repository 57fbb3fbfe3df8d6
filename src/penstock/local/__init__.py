"""One machine: the bus, the cache and the five services as processes under a supervisor."""

from penstock.local.stack import Stack, StackOptions
from penstock.local.state import UpState, read_state

__all__ = ["Stack", "StackOptions", "UpState", "read_state"]
