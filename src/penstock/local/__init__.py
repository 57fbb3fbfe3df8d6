"""Deployment on one machine: the bus, the cache and the five services as processes under a supervisor."""

from penstock.local.room import LARGEST, SMALLEST, StreamSizes, plan_room
from penstock.local.stack import Stack, StackOptions
from penstock.local.state import UpState, read_state

__all__ = ["LARGEST", "SMALLEST", "Stack", "StackOptions", "StreamSizes", "UpState", "plan_room", "read_state"]
