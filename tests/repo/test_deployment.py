"""The container files match the services that exist, and the settings."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from penstock.client.beside import read_job
from penstock.shared.config import ServiceSettings
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.needs import OPTIONAL, needs
from penstock.shared.protocol.permissions import ROLES
from penstock.shared.transport.streams import (
    AUDIT_BYTES,
    BUCKET_BYTES,
    BUCKETS,
    PARTIAL_BYTES,
    SNAPSHOT_BYTES,
    VIDEO_BYTES,
    max_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if path.is_dir() and path.name != "__pycache__")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
LISTS = runpy.run_path(str(ROOT / "deploy/requirements.py"))
REQUIREMENTS, CLOSURES = LISTS["requirements"], LISTS["closures"]()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


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


def test_trainer_and_rollout_share_the_volume_of_weights() -> None:
    trainer, rollout = COMPOSE["services"]["trainer"], COMPOSE["services"]["rollout"]
    assert trainer["environment"]["PENSTOCK_HOST_ID"] == rollout["environment"]["PENSTOCK_HOST_ID"]
    mount = f"weights:{trainer['environment']['PENSTOCK_SHM_DIR']}"
    assert mount in trainer["volumes"] and mount in rollout["volumes"]
    assert COMPOSE["volumes"]["weights"]["driver_opts"]["type"] == "tmpfs"


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for entry in COMPOSE["services"].values() for port in entry.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_nothing_starts_with_a_known_secret() -> None:
    """Compose refuses to start without secrets; ``deploy/secrets.sh`` creates them."""
    given = {
        name: text
        for entry in COMPOSE["services"].values()
        for name, text in entry.get("environment", {}).items()
        if name == "PENSTOCK_API_KEYS" or name.removeprefix("PENSTOCK_NATS_").lower() in ROLES
    }
    assert given.keys() == {"PENSTOCK_API_KEYS", *(f"PENSTOCK_NATS_{role.upper()}" for role in ROLES)}
    assert all(text == f"${{{name}:?run deploy/secrets.sh}}" for name, text in given.items())


def test_secrets_are_created_once(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    script = tmp_path / "deploy" / "secrets.sh"
    script.write_text((ROOT / "deploy/secrets.sh").read_text(encoding="utf-8"))
    subprocess.run(["sh", script], check=True, capture_output=True)
    first = (tmp_path / ".env").read_text()
    lines = dict(line.split("=", 1) for line in first.splitlines())
    assert lines.keys() == {"PENSTOCK_API_KEYS", *(f"PENSTOCK_NATS_{role.upper()}" for role in ROLES)}
    assert len({*lines.values()}) == len(lines) and all(re.fullmatch("s[0-9a-f]{48}", text) for text in lines.values())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    subprocess.run(["sh", script], check=True, capture_output=True)
    assert (tmp_path / ".env").read_text() == first


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_containers_give_up_what_they_do_not_need(service: str) -> None:
    entry = COMPOSE["services"][service]
    assert entry["cap_drop"] == ["ALL"] and entry["security_opt"] == ["no-new-privileges:true"]
    assert entry["read_only"] is True and entry["pids_limit"] and entry["mem_limit"]
    assert set(entry.get("cap_add", [])) <= {"SETUID", "SETGID"}, "redis changes its user"
    tag = re.search(r":-[^}]*:(\d+\.\d+\.\d+)", entry["image"])
    assert "penstock/" in entry["image"] or tag is not None, "a version is pinned"
    assert re.search(r'^ARG PYTHON_IMAGE="python:\d+\.\d+\.\d+-', DOCKERFILE, re.MULTILINE)


def test_networks_keep_the_bus_and_the_cache_from_others() -> None:
    on = {name: set(entry["networks"]) for name, entry in COMPOSE["services"].items()}
    assert on.pop("coordinator") == {"front", "bus", "cache"}
    assert on.pop("redis") == {"cache"}
    assert set(map(frozenset, on.values())) == {frozenset({"bus"})}


def test_each_service_has_its_own_user_of_the_bus() -> None:
    for service in SERVICES:
        url = COMPOSE["services"][service]["environment"]["PENSTOCK_NATS_URL"]
        assert url == f"nats://{service}:${{PENSTOCK_NATS_{service.upper()}}}@nats:4222"
        assert ("PENSTOCK_API_KEYS" in COMPOSE["services"][service]["environment"]) == (service == "coordinator")
    assert 'include "nats-users.conf"' in (ROOT / "deploy/nats.conf").read_text(encoding="utf-8")


def test_the_bus_is_durable() -> None:
    conf = (ROOT / "deploy/nats.conf").read_text(encoding="utf-8")
    assert re.search(r"^\s*sync_interval: always$", conf, re.MULTILINE)
    assert re.search(r"^max_payload: 8MB$", conf, re.MULTILINE)


def test_the_bus_has_room_for_all_streams() -> None:
    conf = (ROOT / "deploy/nats.conf").read_text(encoding="utf-8")
    settings = ServiceSettings.model_fields
    assert settings["ledger_bytes"].default is None, "as large as the others"
    stream_bytes = settings["stream_bytes"].default
    sizes = max_bytes(experience_bytes=settings["experience_bytes"].default, stream_bytes=stream_bytes)
    comment = re.search(
        r"PENSTOCK_EXPERIENCE_BYTES \+ PENSTOCK_LEDGER_BYTES .*\n +# \+ (\d+) x PENSTOCK_STREAM_BYTES \+ (\d+) MiB of "
        r"snapshots \+ (\d+) MiB of the audit log \+ (\d+) MiB of videos\n +# "
        r"\+ (\d+) MiB of completions in progress \+ (\d+) buckets x (\d+) MiB = ([\d,]+) MiB by",
        conf,
    )
    assert comment is not None
    assert [int(number.replace(",", "")) << 20 for number in comment.groups()] == [
        sum(size == stream_bytes for size in sizes.values()) - 1 << 20, SNAPSHOT_BYTES, AUDIT_BYTES, VIDEO_BYTES,
        PARTIAL_BYTES, len(BUCKETS) << 20, BUCKET_BYTES, sum(sizes.values()),
    ]  # fmt: skip
    assert f"{sum(sizes.values()) >> 20:,} MiB by default" in (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    store = re.search(r"max_file_store: (\d+)GB", conf)
    assert store is not None and int(store[1]) << 30 >= sum(sizes.values())


def test_images_build_without_a_registry_of_frontends() -> None:
    assert "syntax=" not in DOCKERFILE
    assert DOCKERFILE.count("USER penstock") == len(SERVICES) + 1, "no service runs as root, nor rollout with vLLM"


@pytest.mark.parametrize("name", ["gpu", "vllm"])
def test_overlays_weaken_nothing(name: str) -> None:
    overlay = yaml.safe_load((ROOT / f"deploy/{name}.yml").read_text(encoding="utf-8"))["services"]
    assert overlay.keys() <= COMPOSE["services"].keys()
    for service, entry in overlay.items():
        assert entry.keys() <= {"image", "build", "deploy", "ulimits", "shm_size"}, service
        target = entry["build"].get("target", service)
        assert re.search(rf"^FROM \w+ AS {target}$", DOCKERFILE, re.MULTILINE)
        stage = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert f'CMD ["python", "-m", "penstock.services.{service}"]' in stage and "USER penstock" in stage


def test_the_image_with_vllm_has_the_pins_of_its_environment() -> None:
    pins = "services/rollout/engines/requirements/vllm.txt"
    stage = DOCKERFILE.partition(" AS vllm\n")[2].partition("\nFROM ")[0]
    assert (ROOT / pins).is_file() and f"COPY deploy/install-engine.sh {pins} /deps/\n" in stage
    assert "RUN sh /deps/install-engine.sh /deps/vllm.txt\n" in stage
    script = (ROOT / "deploy/install-engine.sh").read_text(encoding="utf-8")
    installs = [part for part in re.split(r"\n|\|\|", script) if part.strip().startswith("pip install")]
    assert len(installs) == 3 and all("--no-deps" in part for part in installs), "what the pins leave out stays out"
    assert "!deploy/install-engine.sh" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_requirements_of_extras_are_expanded() -> None:
    core, trainer = REQUIREMENTS(PROJECT, []), REQUIREMENTS(PROJECT, ["trainer"])
    assert core == PROJECT["dependencies"]
    assert any(line.startswith("torch>=") for line in trainer) and not any(line.startswith("torch") for line in core)
    assert not any(line.startswith("penstock") for line in trainer)


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize("extra", sorted(CLOSURES.keys() - {"build", "core"}))
def test_the_list_of_an_extra_names_what_it_requires(extra: str) -> None:
    assert {name_of(line) for line in REQUIREMENTS(PROJECT, [extra])} <= CLOSURES[extra]
    assert CLOSURES["core"] <= CLOSURES[extra]


def test_lists_of_requirements_contain_all_dependencies() -> None:
    """A list contains the dependencies of its packages, because images install pins without dependencies."""

    def needs_of(name: str) -> Iterator[str]:
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield name_of(line)

    there = {name_of(one.metadata["Name"]) for one in metadata.distributions()}
    assert len(there & CLOSURES["dev"]) > 100, "the environment of the tests is made from the same lock"
    for extra, names in CLOSURES.items():
        for name in sorted((names - {"torch"}) & there):
            assert {*needs_of(name)} <= names, (extra, name)


def test_images_install_pins_with_hashes() -> None:
    """Exceptions are torch, and extras that are not in the lock file."""
    script = (ROOT / "deploy/install.sh").read_text(encoding="utf-8")
    assert 'pip install --no-deps --require-hashes -r "$locked"' in script and "pip check" in script
    runs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert runs and all(line.endswith("pip install --no-deps /dist/*.whl") for line in runs), (
        "nothing beside the script"
    )
    lists = re.findall(r"python deploy/requirements\.py ([\w ]+)", stages()["lists"][1])
    assert len(lists) == 5 + len(SERVICES)
    for extras in lists:
        command = [sys.executable, ROOT / "deploy/requirements.py", *extras.split()]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        entries = re.split(r"\n(?=\S)", printed.strip())
        entries = [entry for entry in entries if not entry.startswith("# torch")]
        assert all(re.match(r"\S+==\S+", entry) and "--hash=sha256:" in entry for entry in entries), extras


def test_requirements_outside_the_lock_file_are_listed() -> None:
    loose = LISTS["unlocked"](PROJECT, ["verifiers", "env"])
    assert loose == PROJECT["optional-dependencies"]["verifiers"] and "verifiers" not in CLOSURES
    with pytest.raises(KeyError):
        LISTS["unlocked"](PROJECT, ["no-such-extra"])


def stages() -> dict[str, tuple[str, str]]:
    """Return, by name, the base stage and the text of each stage of the Dockerfile."""
    found = re.findall(r"^FROM (\S+) AS (\w+)$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return {name: (parent, text) for parent, name, text in found}


def installed(service: str) -> set[str]:
    """Return the packages in the image of a service, as it is built by default."""
    lists = dict(re.findall(r"requirements\.py (\w[\w -]*?) ?(?:\$\w+ )?> (\w+\.txt)", stages()["lists"][1]))
    extras_of = {file: extras.split() for extras, file in lists.items()} | {f"{service}.txt": ["core"]}
    found: set[str] = set()
    stage = service
    while stage in stages():
        parent, text = stages()[stage]
        for copied in re.findall(r"^COPY --from=lists (.+) /deps/$", text, re.MULTILINE):
            for file in re.findall(r"/deps/(\w+\.txt)", copied):
                found |= set[str]().union(*(CLOSURES[extra] for extra in extras_of[file]))
            assert f"RUN sh /deps/install.sh /deps/{file}" in text, "what is copied is installed"
        stage = parent
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_images_can_run_the_examples(path: Path) -> None:
    job = parse_job(read_job(path).data)
    for need in needs(job):
        assert CLOSURES[need.extra] <= installed(need.service), (path.name, need)


def test_an_example_needs_more_than_torch() -> None:
    found = [need for path in EXAMPLES for need in needs(parse_job(read_job(path).data))]
    assert {("peft", "rollout"), ("peft", "trainer")} <= {(need.package, need.service) for need in found}
    assert not CLOSURES["lora"] <= installed("reward"), "the test can fail"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_takes_more_extras(service: str) -> None:
    argument = f"EXTRAS_{service.upper()}"
    assert f'ARG {argument}=""\n' in DOCKERFILE
    assert f"requirements.py core ${argument} > {service}.txt" in DOCKERFILE
    assert f"COPY --from=lists /deps/{service}.txt /deps/" in stages()[service][1]
    assert COMPOSE["services"][service]["build"]["args"][argument] == f"${{{argument}:-}}"
    assert f"`{argument}" in (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_packages_that_an_image_may_lack_are_extras() -> None:
    assert set(OPTIONAL.values()) <= set(PROJECT["optional-dependencies"])
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        name for line in re.findall(r"^COPY (deploy/.*) deploy/$", DOCKERFILE, re.MULTILINE) for name in line.split()
    ]
    assert copied and all(f"!{name}" in ignored for name in copied)
