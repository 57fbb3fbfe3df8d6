"""Network inputs: normalised and concatenated vectors, and images encoded by convolutions.

Shape legend: N = observations, O = components of the concatenated vectors, F = features that a network's layers read,
H, W, C = rows, columns, channels of an image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.shared.config.embodied import EncoderConfig

__all__ = ["Normaliser", "ObservationEncoder", "Seen"]

LONGEST_DEVIATION = 10.0
"""Clipping bound of normalised numbers, in standard deviations."""
MOST_IMAGES = 512
"""Largest number of images per convolution call, which bounds the memory of their activations."""


class Seen(NamedTuple):
    """Observations as input of networks: normalized vectors, float32 [N, O], and images, each uint8 [N, H, W, C]."""

    numbers_NO: Tensor
    images: tuple[Tensor, ...] = ()

    def rows(self, own_M: Tensor) -> Seen:
        """Return the observations of the rows that ``own_M`` selects."""
        return Seen(self.numbers_NO[own_M], tuple(image[own_M] for image in self.images))


class Normaliser(nn.Module):
    """Mean and standard deviation of each component of all observations trained on so far, as buffers in float64.

    These statistics are part of the weights: a version acts on the statistics that it was trained with.
    """

    count: Tensor
    mean_O: Tensor
    squares_O: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean_O", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares_O", torch.zeros(size, dtype=torch.float64))

    def forward(self, numbers_NO: Tensor) -> Tensor:
        """Return the vectors shifted, scaled and clipped, float32 [N, O]; before the first ``observe`` only clipped."""
        variance_O = torch.where(self.count > 0, self.squares_O / self.count.clamp(min=1), 1)
        scaled_NO = (numbers_NO.double() - self.mean_O) / (variance_O + 1e-8).sqrt()
        return scaled_NO.clamp(-LONGEST_DEVIATION, LONGEST_DEVIATION).float()

    @torch.no_grad()
    def observe(self, numbers_NO: Tensor) -> None:
        """Add observations; their sums of squares are merged as in Chan, Golub and LeVeque (1979), eq. 2.1."""
        if not len(numbers_NO):
            return
        values_NO, count = numbers_NO.double(), float(len(numbers_NO))
        mean_O = values_NO.mean(0)
        shift_O, total = mean_O - self.mean_O, self.count + count
        self.squares_O += (values_NO - mean_O).square().sum(0) + shift_O.square() * (self.count * count / total)
        self.mean_O += shift_O * (count / total)
        self.count += count


class ObservationEncoder(nn.Module):
    """Encoder that concatenates the vectors of an observation and the encodings of its images.

    Without images the encoder has no weights and is the identity.

    Args:
        num_numbers: O.
        images: (H, W, C) of each image.

    Attributes:
        num_features: F.
        num_products: weight multiplications per observation.
    """

    def __init__(self, config: EncoderConfig, num_numbers: int, images: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self._arguments = config, num_numbers, images
        self.images = nn.ModuleList(_Convolutions(config, shape) for shape in images)
        self.num_features = num_numbers + len(images) * config.features
        self.num_products = sum(_num_products(config, shape) for shape in images)

    def another(self) -> ObservationEncoder:
        """Return a new encoder for the same observations, with new weights."""
        return ObservationEncoder(*self._arguments)

    def forward(self, seen: Seen) -> Tensor:
        """Encode observations, float32 [N, F]."""
        if not self.images:
            return seen.numbers_NO
        made = [encoder(image) for encoder, image in zip(self.images, seen.images, strict=True)]
        return torch.cat([seen.numbers_NO, *made], dim=1)


class _Convolutions(nn.Module):
    """Convolutional encoder of one image (the layout of Mnih et al. 2015). Orthogonal weights of gain √2, biases 0."""

    def __init__(self, config: EncoderConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((shape[2], *config.channels), config.channels, strict=False):
            size, stride = config.kernel_size, config.stride
            layers += [nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), nn.ReLU()]
        *_, (rows, columns) = _map_sizes(config, shape)
        layers += [nn.Flatten(), nn.Linear(config.channels[-1] * rows * columns, config.features), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, math.sqrt(2))
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, image_NHWC: Tensor) -> Tensor:
        """Encode uint8 [N, H, W, C], scaled to [0, 1], as float32 [N, features]."""
        return torch.cat([self._encode(part) for part in torch.split(image_NHWC, MOST_IMAGES)])

    def _encode(self, image_NHWC: Tensor) -> Tensor:
        encoded: Tensor = self.layers(image_NHWC.permute(0, 3, 1, 2).float() / 255)
        return encoded


def _map_sizes(config: EncoderConfig, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the numbers of rows and columns of the image after each convolution."""
    rows, columns = shape[:2]
    sizes = []
    for _ in config.channels:
        rows, columns = ((side - 1) // config.stride + 1 for side in (rows, columns))
        sizes.append((rows, columns))
    return sizes


def _num_products(config: EncoderConfig, shape: Sequence[int]) -> int:
    sizes, inputs, total = _map_sizes(config, shape), shape[2], 0
    for (rows, columns), outputs in zip(sizes, config.channels, strict=True):
        total += rows * columns * inputs * outputs * config.kernel_size**2
        inputs = outputs
    rows, columns = sizes[-1]
    return total + rows * columns * inputs * config.features
