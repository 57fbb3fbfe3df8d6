"""The container files describe the services that exist, and nothing drifts between them and the settings."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.shared.config import ServiceSettings
from penstock.shared.transport.streams import AUDIT_BYTES, BUCKET_BYTES, BUCKETS, SNAPSHOT_BYTES, max_bytes

ROOT = Path(__file__).resolve().parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir() and path.name != "__pycache__")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")


def test_the_five_services() -> None:
    assert SERVICES == ["coordinator", "env", "reward", "rollout", "trainer"]


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_container(service: str) -> None:
    entry = COMPOSE["services"][service]
    assert entry["build"]["target"] == service
    assert re.search(rf"^FROM \w+ AS {service}$", DOCKERFILE, re.MULTILINE), "a build target"
    assert f'CMD ["python", "-m", "penstock.services.{service}"]' in DOCKERFILE
    assert (ROOT / "services" / service / "__main__.py").exists()


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_each_container_is_supervised(name: str) -> None:
    entry = COMPOSE["services"][name]
    assert entry["init"] is True and entry["restart"] == "unless-stopped"
    assert entry["healthcheck"]["test"] and entry["healthcheck"]["start_interval"]


@pytest.mark.parametrize("service", SERVICES)
def test_only_known_settings_are_given(service: str) -> None:
    known = {f"PENSTOCK_{name.upper()}" for name in ServiceSettings.model_fields}
    assert set(COMPOSE["services"][service]["environment"]) <= known


def test_weights_are_shared_by_those_who_say_so() -> None:
    trainer, rollout = COMPOSE["services"]["trainer"], COMPOSE["services"]["rollout"]
    assert trainer["environment"]["PENSTOCK_HOST_ID"] == rollout["environment"]["PENSTOCK_HOST_ID"]
    mount = f"weights:{trainer['environment']['PENSTOCK_SHM_DIR']}"
    assert mount in trainer["volumes"] and mount in rollout["volumes"]
    assert COMPOSE["volumes"]["weights"]["driver_opts"]["type"] == "tmpfs"


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for entry in COMPOSE["services"].values() for port in entry.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_the_api_has_a_key() -> None:
    assert COMPOSE["services"]["coordinator"]["environment"]["PENSTOCK_API_KEYS"]


def test_the_bus_is_durable() -> None:
    conf = (ROOT / "deploy/nats.conf").read_text(encoding="utf-8")
    assert re.search(r"^\s*sync_interval: always$", conf, re.MULTILINE)
    assert re.search(r"^max_payload: 8MB$", conf, re.MULTILINE)


def test_the_bus_has_room_for_all_streams() -> None:
    conf = (ROOT / "deploy/nats.conf").read_text(encoding="utf-8")
    settings = ServiceSettings.model_fields
    stream_bytes = settings["stream_bytes"].default
    sizes = max_bytes(experience_bytes=settings["experience_bytes"].default, stream_bytes=stream_bytes)
    told = re.search(
        r"PENSTOCK_EXPERIENCE_BYTES \+ (\d+) x PENSTOCK_STREAM_BYTES \+ (\d+) MiB of snapshots\n"
        r" +# \+ (\d+) MiB of the audit log \+ (\d+) buckets x (\d+) MiB = ([\d,]+) MiB by default",
        conf,
    )
    assert told is not None
    assert [int(number.replace(",", "")) << 20 for number in told.groups()] == [
        sum(size == stream_bytes for size in sizes.values()) << 20, SNAPSHOT_BYTES, AUDIT_BYTES, len(BUCKETS) << 20,
        BUCKET_BYTES, sum(sizes.values()),
    ]  # fmt: skip
    assert f"{sum(sizes.values()) >> 20:,} MiB by default" in (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    store = re.search(r"max_file_store: (\d+)GB", conf)
    assert store is not None and int(store[1]) << 30 >= sum(sizes.values())


def test_images_build_without_a_registry_of_frontends() -> None:
    assert "syntax=" not in DOCKERFILE
    assert DOCKERFILE.count("USER penstock") == len(SERVICES), "no service runs as root"


def test_requirements_of_extras_are_expanded() -> None:
    requirements = runpy.run_path(str(ROOT / "deploy/requirements.py"))["requirements"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, trainer = requirements(project, []), requirements(project, ["trainer"])
    assert core == project["dependencies"]
    assert any(line.startswith("torch>=") for line in trainer) and not any(line.startswith("torch") for line in core)
    assert not any(line.startswith("penstock") for line in trainer)
