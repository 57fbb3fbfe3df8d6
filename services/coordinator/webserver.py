"""The HTTP server of the API, and which proxies it believes."""

from __future__ import annotations

import ipaddress

import uvicorn
from starlette.types import ASGIApp

from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError

__all__ = ["server_of"]


def server_of(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Server:
    """A server of ``app`` that leaves signals alone.

    Raises:
        ConfigError: PENSTOCK_FORWARDED_ALLOW_IPS names what is no address and no network.
    """
    proxies = _proxies(settings.forwarded_allow_ips)
    config = uvicorn.Config(
        app, host=settings.http_host, port=settings.http_port, log_config=None, access_log=False,
        timeout_graceful_shutdown=3, lifespan="on", proxy_headers=bool(proxies), forwarded_allow_ips=proxies,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    return server


def _proxies(text: str) -> list[str]:
    """Read here first: what uvicorn cannot read it takes for a name, which no client ever has."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if found == ["*"]:
        return found
    for part in found:
        try:
            ipaddress.ip_network(part)
        except ValueError as error:
            raise ConfigError(
                f"PENSTOCK_FORWARDED_ALLOW_IPS: {error}; it must look like 10.0.0.1,10.1.0.0/16"
            ) from None
    return found
