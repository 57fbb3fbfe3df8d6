"""The key file of a deployment, and the clients that find it."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from penstock.client.answers import default_headers, find_api_key
from penstock.services.coordinator.auth import KeyRing
from penstock.shared.config.local_key import LOCK, announce_key, ensure_secret, find_key, key_file, withdraw_key
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError

URL = "http://127.0.0.1:8123"


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_clients_of_the_user_find_the_key_while_the_deployment_runs(data_dir: Path) -> None:
    secret = ensure_secret(key_file(data_dir))
    announce_key(URL, data_dir)
    assert find_key(URL) is None, "no deployment runs there, so the key must not be sent there"
    with (data_dir / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_key(URL) == find_key("http://localhost:8123/") == secret
        assert default_headers(None, URL) == {"Authorization": f"Bearer {secret}"}
        assert find_api_key(URL) == secret
        assert default_headers("mine", URL) == {"Authorization": "Bearer mine"}
        assert find_key("http://127.0.0.1:8124") is None
        assert find_key("http://example.org:8123") is None, "the key is sent to no other host"
        withdraw_key(URL, data_dir / "other")
        assert find_key(URL) == secret
        withdraw_key(URL, data_dir)
        assert find_key(URL) is None


def test_a_secret_is_created_once_and_only_its_user_may_read_it(data_dir: Path) -> None:
    file = data_dir / "secret"
    assert ensure_secret(file) == ensure_secret(file)
    assert len(ensure_secret(file)) == 43
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(data_dir.iterdir()) == [file]
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users may read"):
        ensure_secret(file)
    with pytest.raises(ConfigError, match="cannot keep a secret"):
        ensure_secret(data_dir / "nowhere" / "secret")


def test_an_api_without_keys_needs_explicit_permission(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_OPEN_LOOPBACK"):
        KeyRing(ServiceSettings(api_keys="", open_loopback=False), None)  # type: ignore[arg-type]
    assert not KeyRing(ServiceSettings(api_keys="", open_loopback=True), None).required  # type: ignore[arg-type]
    assert "every user" in caplog.text
    with pytest.raises(ConfigError, match="without a key"):
        KeyRing(ServiceSettings(api_keys="", open_loopback=True, http_host="0.0.0.0"), None)  # type: ignore[arg-type]
