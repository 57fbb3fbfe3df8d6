"""Prometheus metrics of this process: one registry, the prefix ``penstock_``, base units only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

__all__ = ["CONTENT_TYPE", "REGISTRY", "counter", "gauge", "histogram", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "penstock_"
OTHER_UNITS = ("_milliseconds", "_ms", "_us", "_minutes", "_hours", "_kb", "_mb", "_gb", "_mib", "_gib", "_percent")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

REGISTRY = CollectorRegistry()
"""Registry of the metrics that ``/metrics`` returns."""

_known: dict[str, MetricWrapperBase] = {}
W = TypeVar("W", bound=MetricWrapperBase)


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """Return a counter, which only grows; its name gets the suffix ``_total``."""
    return _register(Counter, name.removesuffix("_total"), text, labels)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Return a gauge, which can rise and fall."""
    return _register(Gauge, name, text, labels)


def histogram(name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS) -> Histogram:
    """Return a histogram; default buckets are durations from 1 ms to 5 min."""
    full = _checked(name)
    if full not in _known:
        _known[full] = Histogram(full, text, labels, buckets=buckets, registry=REGISTRY)
    return _typed(full, Histogram)


def render() -> bytes:
    """Return all metrics in Prometheus's text format."""
    return generate_latest(REGISTRY)


def _register(kind: type[W], name: str, text: str, labels: Sequence[str]) -> W:
    full = _checked(name)
    if full not in _known:
        _known[full] = kind(full, text, labels, registry=REGISTRY)
    return _typed(full, kind)


def _typed(full: str, kind: type[W]) -> W:
    metric = _known[full]
    if not isinstance(metric, kind):
        raise TypeError(f"metric '{full}' exists already as a {type(metric).__name__}")
    return metric


def _checked(name: str) -> str:
    wrong = next((unit for unit in OTHER_UNITS if name.endswith(unit)), None)
    if wrong is not None:
        raise ValueError(f"metric '{name}': use seconds, bytes or a ratio instead of '{wrong}'")
    return PREFIX + name.removeprefix(PREFIX)
