"""Settings of a service process: environment variables only."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.shared.errors import ConfigError

__all__ = ["CHECKPOINTS", "ServiceSettings", "checkpoint_path", "load_settings", "recorded_path"]

CHECKPOINTS = "checkpoints"
"""Directory under the data directory: one directory per job, one per checkpoint in it."""


class ServiceSettings(BaseSettings):
    """Read from ``PENSTOCK_*``; every field is one variable and is documented in docs/operations.md."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    nats_url: str = "nats://127.0.0.1:4222"
    """The message bus, with the user of this service and its password: `nats://rollout:PASSWORD@HOST:4222`."""
    nats_tls_ca: Path | None = None
    """Certificates (PEM) by which the server of the bus proves who it is; set it wherever the bus leaves the host."""
    nats_tls_cert: Path | None = None
    """Certificate (PEM) by which this service proves to the bus who it is; with nats_tls_key."""
    nats_tls_key: Path | None = None
    """Private key of that certificate (PEM)."""
    nats_monitor_url: str | None = None
    """NATS's HTTP monitor, to verify that streams are fsync'd; without it durability is reported as unverified."""
    redis_url: str | None = None
    """Redis or Valkey for rate limits and idempotency replies; optional."""
    host_id: str = Field(default_factory=socket.gethostname)
    """Processes with the same id share memory (weights, bulk data). Explicit, never guessed across containers."""
    worker_id: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """Name of this process in the registry; stable across restarts when a supervisor sets it."""
    data_dir: Path = Path.home() / ".penstock"
    """Checkpoints and job files."""
    sims_dir: Path = Path.home() / ".penstock" / "sims"
    """Where `penstock sims install` keeps an interpreter for each simulator (env service)."""
    engines_dir: Path = Path.home() / ".penstock" / "engines"
    """Where `penstock engines install` keeps an interpreter for each rollout engine that needs its own."""
    sglang_python: Path | None = None
    """Interpreter from which the rollout worker starts SGLang; without it that of `penstock engines install sglang`."""
    sglang_url: str = ""
    """Address of an SGLang that runs already, `http://127.0.0.1:30000`, for this rollout worker alone: it replaces the
    weights, by files in shm_dir, which the server must see under the same path. One job at a time. Empty: the worker
    starts a server for each job."""
    shm_dir: Path = Path("/dev/shm")
    """Directory on tmpfs for weight slots and bulk slots."""
    bulk_host: str = ""
    """Address on which this process serves its bulk data and weights to other hosts, and by which they reach it; empty:
    its own host only."""
    bulk_tls_ca: Path | None = None
    """Certificates (PEM) of the authority that signed those of every process that serves bulk data and weights to other
    hosts, or fetches them. With one of the bulk_tls variables these connections speak TLS alone; set all three wherever
    there is a bulk_host."""
    bulk_tls_cert: Path | None = None
    """Certificate (PEM) by which this process proves who it is, for its bulk_host; with bulk_tls_key."""
    bulk_tls_key: Path | None = None
    """Private key of that certificate (PEM)."""
    weight_collective: Literal["", "gloo", "nccl"] = ""
    """Take part in broadcasts of weights between hosts, with trainer and workers that say the same: `gloo` from memory
    to memory, `nccl` between GPUs. The trainer needs bulk_host. Such connections are neither encrypted nor
    authenticated, so set it on trusted networks alone; empty: other hosts fetch weights over TCP."""
    bulk_bytes: int = Field(1 << 30, ge=1 << 20)
    """Most shared memory for the bulk data of this process."""
    http_host: str = "127.0.0.1"
    """Bind address of the API (coordinator)."""
    http_port: int = 8000
    """Port of the API (coordinator); 0 picks a free one."""
    health_host: str = "127.0.0.1"
    """Bind address of /healthz, /readyz and /metrics of every process; nobody is asked for a key there."""
    health_port: int = 0
    """Port of these; 0 picks a free one."""
    api_keys: str = ""
    """Comma-separated bearer keys, which may do everything. `penstock up` without any makes one: `DATA_DIR/api.key`."""
    open_loopback: bool = False
    """Where there are no api_keys: whoever reaches the API may do everything. Only on a loopback address, and only
    where every user and every program of the machine is trusted (coordinator)."""
    forwarded_allow_ips: str = ""
    """Addresses and networks of proxies, comma-separated, or `*`: who is believed when it names the client of a request
    (`X-Forwarded-For`, `X-Forwarded-Proto`; coordinator). Empty: nobody."""
    http_connections: int = Field(4096, ge=16)
    """Most connections of clients (coordinator), fewer where it may open fewer files; more are answered 503."""
    http_connections_per_address: int = Field(1024, ge=1)
    """Most connections of one client address (IPv6: one /64); proxies of forwarded_allow_ips are not counted."""
    http_head_bytes: int = Field(64 << 10, ge=1 << 10)
    """Longest request line with all headers; a longer one is answered 431."""
    http_head_s: float = Field(10.0, gt=0)
    """Longest that a connection may say nothing, or take for the headers of a request (408)."""
    http_body_s: float = Field(30.0, gt=0)
    """Longest that a request body may take (408), and a second more for each 16 KiB that came."""
    key_concurrency: int = Field(1024, ge=1)
    """Requests that one key may have in hand, event streams and long polls included (429); keys of episodes and tokens
    count with the key that made them."""
    key_large_bodies: int = Field(4, ge=1)
    """Bodies above 1 MiB that are read at once for one key; others wait for up to 10 s, then 429."""
    large_bodies: int = Field(32, ge=1)
    """The same for all keys together."""
    tenant_share: float = Field(0.95, gt=0, le=1)
    """Share of one key in the bucket of opened episodes, and of one job in the stream of feedback, of what the others
    leave there. Beyond that it is refused (507, 429), and they are not. Of what a job may have, one key may have
    95 % of what its other keys leave."""
    lease_s: float = Field(3.0, gt=0.2)
    """A lease that was not renewed for this long may be taken over by another coordinator or trainer."""
    heartbeat_s: float = Field(1.0, gt=0.05)
    """Interval of heartbeats."""
    drain_s: float = Field(20.0, gt=0)
    """Most time spent on finishing work after SIGTERM."""
    log_files: bool = False
    """Also write the log to a file under data_dir/logs, where `GET /v1/jobs/{id}/logs` finds it if the coordinator sees
    the same data_dir. `penstock up` keeps such files by itself."""
    trainer_ranks: int = Field(1, ge=1, le=1024)
    """Processes that `penstock up` starts as one trainer, for models cut over ranks (`backend` in the job file)."""
    rank_deadline_s: float = Field(600.0, gt=0)
    """Longest that one rank of a trainer waits for another, while models are built and in every collective."""
    rank_silence_s: float = Field(60.0, gt=0)
    """A rank of a trainer that gives no sign of life for this long is lost, and all ranks start over. Steps may take
    longer: a rank that computes gives signs."""
    code_modules: str = "*"
    """Modules, comma-separated, of which job files may name functions, tools and environments, with what lies below
    them; `*`: all (coordinator). A key needs the scope `jobs:code` for that, and may be bound to fewer modules."""
    job_roots: str = ""
    """Directories, comma-separated, in which the data, models and tokenizers that a job file names must lie, symbolic
    links followed (coordinator). Empty: anywhere for keys with the scope admin, nowhere for others, who train on
    built-in data, models of a hub and checkpoints of jobs."""
    worker_env: str = ""
    """Names of environment variables, comma-separated, that `penstock up` hands through to its workers, beside what
    they need anyway; functions and tools of jobs see them. Of anything else there they see nothing."""
    scorer_env: str = ""
    """Names of environment variables of the reward service, comma-separated, that scorers of a job may send to the
    address in the job file (`api_key_env`, `secret_env`); none by default."""
    scorer_private: bool = False
    """Let scorers and judges of job files ask private, loopback and link-local addresses, too (reward). `penstock up`
    allows it unless this is set. The address of grader_url is always allowed."""
    webhook_private: bool = False
    """Deliver webhooks to private, loopback and link-local addresses, too (coordinator)."""
    base_models: Path | None = None
    """Directory with a file `NAME.yaml` for each model that `/v1/fine_tuning/jobs` may name (coordinator): the start of
    a job file, in which requests put data, reward and hyper-parameters."""
    deploy_most: int = Field(4, ge=0)
    """Checkpoints that are served at once because a request named one (`model: job:NAME@final`); 0: none is, only what
    somebody deploys with `penstock serve`."""
    deploy_idle_s: float = Field(600.0, gt=0)
    """Seconds after its last request after which such a checkpoint is served no more."""
    files_bytes: int = Field(16 << 30, ge=1 << 20)
    """Most bytes of uploaded data sets, all together (coordinator); more are refused."""
    max_files: int = Field(1000, ge=1)
    """Most uploaded data sets (coordinator)."""
    grader_url: str = ""
    """OpenAI-compatible address, up to and with `/v1`, of the models that `score_model` graders in requests name
    (coordinator); empty: such graders are refused."""
    grader_key_env: str = ""
    """Name of the variable that holds the key for that; the reward service has it, and allows it in scorer_env."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    rate_limit: str = "600/minute"
    """API requests of one key (`limits` notation); needs redis_url to be shared between replicas."""
    live_rate_limit: str = "60000/minute"
    """Requests of one key to models and feedback, counted apart; a key's own rate replaces both."""
    user_rate_limit: str = ""
    """Live requests and items of feedback of one key that name the same end user, like 60/minute. Empty: no limit."""
    token_rate_limit: str = ""
    """Tokens of prompts and answers that one key may have, like 1000000/minute. An answer is counted when it
    ends, so the last one may go beyond. Empty: no limit."""
    address_rate_limit: str = ""
    """API requests of one client address (IPv6: one /64), with a valid key or without. Empty: no limit."""
    experience_bytes: int = Field(4 << 30, ge=1 << 20)
    """Size of the EXPERIENCE stream; a full stream refuses new messages. Where neither size is set, `penstock up` keeps
    those of streams that exist, and makes new ones as large as its disk allows, up to the default."""
    ledger_bytes: int | None = Field(None, ge=1 << 20)
    """Size of the LEDGER stream, for what jobs have not archived yet; default: that of the other streams. Near its end
    no further job is accepted."""
    stream_bytes: int = Field(1 << 30, ge=1 << 20)
    """Size of each other stream."""
    stream_replicas: int = Field(1, ge=1, le=5)
    """Nodes of a NATS cluster that keep each stream and bucket: 1, 3 or 5. Streams that exist get more replicas where
    this asks for more, and never fewer."""
    live_keep_s: float | None = Field(None, ge=2 * 86400)
    """Live interactions and feedback are removed after this time (coordinator); default: they stay until room is
    needed. Longer than anything in a job file that they are waited for."""
    audit_keep_s: float | None = Field(None, ge=86400)
    """Records of the audit log are removed after this time (coordinator); default: when their stream, of 256 MiB at
    most, needs the room."""

    @field_validator("stream_replicas")
    @classmethod
    def _has_majority(cls, replicas: int) -> int:
        if replicas % 2 == 0:
            raise ValueError("an even number of replicas survives no more than one fewer: use 1, 3 or 5")
        return replicas

    @property
    def nats_tls(self) -> ssl.SSLContext | None:
        """How to speak TLS with the bus; None where nothing is set.

        Raises:
            ConfigError: a file cannot be read, or a certificate has no key.
        """
        return _tls_context("NATS", self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)

    @property
    def bulk_tls_client(self) -> ssl.SSLContext | None:
        """How to fetch bulk data and weights of other hosts over TLS; None where nothing is set. Raises ConfigError."""
        return _tls_context("BULK", self.bulk_tls_ca, self.bulk_tls_cert, self.bulk_tls_key)

    @property
    def bulk_tls_server(self) -> ssl.SSLContext | None:
        """How to serve them over TLS; None where nothing is set. With authorities a peer needs a certificate, too.

        Raises:
            ConfigError: a file cannot be read, or there is no certificate to serve with.
        """
        return _tls_context("BULK", self.bulk_tls_ca, self.bulk_tls_cert, self.bulk_tls_key, serves=True)

    @property
    def sglang_interpreter(self) -> Path | None:
        """The interpreter that starts SGLang; None where there is none."""
        found = self.sglang_python or self.engines_dir.expanduser() / "sglang" / "bin" / "python"
        return found if found.is_file() else None

    @property
    def engines(self) -> list[str]:
        """Rollout engines that run beside this process, in interpreters or servers of their own."""
        return ["sglang"] if self.sglang_url or self.sglang_interpreter is not None else []

    @property
    def ledger_size(self) -> int:
        """Size of the LEDGER stream, in bytes."""
        return self.stream_bytes if self.ledger_bytes is None else self.ledger_bytes


def _tls_context(
    plane: str, ca: Path | None, cert: Path | None, key: Path | None, *, serves: bool = False
) -> ssl.SSLContext | None:
    """Context of one end of a connection; None where nothing is set. Raises ConfigError."""
    names = f"PENSTOCK_{plane}_TLS"
    if ca is None and cert is None and key is None:
        return None
    if (cert is None) != (key is None):
        raise ConfigError(f"{names}_CERT and {names}_KEY belong together: set both")
    if serves and cert is None:
        raise ConfigError(f"PENSTOCK_{plane}_HOST serves other hosts over TLS: set {names}_CERT and {names}_KEY, too")
    try:
        purpose = ssl.Purpose.CLIENT_AUTH if serves else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=ca)
        if serves and ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(f"a file of {names}_* cannot be used: {error}") from None
    return context


def load_settings(environment: Mapping[str, str] | None = None) -> ServiceSettings:
    """Settings from the environment; variables in ``environment`` come before those of this process.

    Raises:
        ConfigError: a variable has a value that cannot be used.
    """
    variables = {f"PENSTOCK_{name.upper()}": name for name in ServiceSettings.model_fields}
    given: dict[str, Any] = {variables[key]: text for key, text in (environment or {}).items() if key in variables}
    try:
        return ServiceSettings(**given)
    except ValidationError as error:
        lines = [f"PENSTOCK_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError("environment is not valid:\n  " + "\n  ".join(lines)) from None


def recorded_path(data_dir: Path, path: Path) -> str:
    """How a ledger names the checkpoint in the directory ``path``: relative to the data directory, which may move."""
    return path.relative_to(data_dir).as_posix() if path.is_relative_to(data_dir) else str(path)


def checkpoint_path(data_dir: Path, recorded: str) -> Path:
    """Directory of the checkpoint that a ledger names ``recorded``.

    Ledgers of earlier versions name it absolutely: of such a path the part below the data directory of then counts, so
    that a deployment whose data was moved or copied reads its own files.
    """
    path = Path(recorded)
    if path.is_absolute() and path.parts[-3:-2] == (CHECKPOINTS,):
        path = Path(*path.parts[-3:])
    return data_dir / path
