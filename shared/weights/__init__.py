"""Weight plane: the trainer publishes versions; engines stage, verify, and swap them at a token boundary."""

from penstock.shared.weights.base import Staged, Way, WeightPublisher, WeightReceiver
from penstock.shared.weights.device import device_memory
from penstock.shared.weights.flat import digest_of_tensors, layout_of
from penstock.shared.weights.open import cleanup, open_publisher, open_receiver

__all__ = [
    "Staged",
    "Way",
    "WeightPublisher",
    "WeightReceiver",
    "cleanup",
    "device_memory",
    "digest_of_tensors",
    "layout_of",
    "open_publisher",
    "open_receiver",
]
