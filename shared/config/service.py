"""Settings of a service process, from environment variables only."""

from __future__ import annotations

import importlib.util
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from penstock.shared.errors import ConfigError

__all__ = ["CHECKPOINTS", "ServiceSettings", "checkpoint_path", "load_settings", "recorded_path"]

CHECKPOINTS = "checkpoints"
"""Name of the directory of checkpoints, under the data directory. Each job has a directory in it, with one directory
per checkpoint."""


class ServiceSettings(BaseSettings):
    """Settings read from ``PENSTOCK_*``; each field is one variable, documented in docs/operations.md."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    nats_url: str = "nats://127.0.0.1:4222"
    """Address of the message bus, with the user of this service and its password:
    `nats://rollout:PASSWORD@HOST:4222`."""
    nats_tls_ca: Path | None = None
    """Certificates (PEM) of the authority that signed the bus server's certificate; set it wherever the bus is
    reached over a network."""
    nats_tls_cert: Path | None = None
    """Client certificate (PEM) of this service for the bus; nats_tls_key must be set, too."""
    nats_tls_key: Path | None = None
    """Private key (PEM) of the certificate nats_tls_cert."""
    nats_monitor_url: str | None = None
    """HTTP monitor of NATS, to verify that streams are fsync'd; without it durability is reported as unverified."""
    redis_url: str | None = None
    """Redis or Valkey for rate limits and idempotency replies; optional."""
    host_id: str = Field(default_factory=socket.gethostname)
    """Id of this host, by default its name. Processes with the same id share memory (weights, bulk data): set it in
    containers that share memory."""
    worker_id: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """Name of this process in the registry; stable across restarts if a supervisor sets it."""
    data_dir: Path = Path.home() / ".penstock"
    """Directory of checkpoints and job files."""
    sims_dir: Path = Path.home() / ".penstock" / "sims"
    """Directory in which `penstock sims install` keeps a Python environment for each simulator (env service)."""
    engines_dir: Path = Path.home() / ".penstock" / "engines"
    """Directory in which `penstock engines install` keeps a Python environment for each rollout engine that needs
    its own."""
    vllm_python: Path | None = None
    """Interpreter with which the rollout worker starts vLLM's server; default: the worker's own if it has vLLM, else
    that of `penstock engines install vllm`."""
    sglang_python: Path | None = None
    """Interpreter with which the rollout worker starts SGLang; default: that of `penstock engines install sglang`."""
    sglang_url: str = ""
    """Address of a running SGLang server, `http://127.0.0.1:30000`, used by this rollout worker only: the worker
    replaces its weights through files in shm_dir, which the server must see under the same path. One job at a time.
    Empty: the worker starts a server for each job."""
    shm_dir: Path = Path("/dev/shm")
    """Directory on tmpfs for weight slots and bulk slots."""
    bulk_host: str = ""
    """Address under which this process serves its bulk data and weights to other hosts; empty: only processes on its
    own host can read them."""
    bulk_tls_ca: Path | None = None
    """Certificates (PEM) of the authority that signed the certificates of all processes that serve bulk data and
    weights to other hosts, or fetch them. If any of the bulk_tls variables is set, these connections use only TLS;
    set all three wherever bulk_host is set."""
    bulk_tls_cert: Path | None = None
    """Certificate (PEM) of this process for its bulk_host; bulk_tls_key must be set, too."""
    bulk_tls_key: Path | None = None
    """Private key of bulk_tls_cert (PEM)."""
    weight_collective: Literal["", "gloo", "nccl"] = ""
    """Transport of weight broadcasts between hosts, which trainer and workers must set to the same value: `gloo`
    from memory to memory, `nccl` between GPUs. The trainer needs bulk_host. Such connections are neither encrypted
    nor authenticated, so set it only on trusted networks; empty: other hosts fetch weights over TCP."""
    weight_deltas: bool = False
    """Send a version over TCP as its changes to a version that the other host has (set at the trainer): a fraction of
    the bytes where few weights change, as in bfloat16 at small learning rates. Weights stay bit-identical, and a host
    without the earlier version gets all of them. Comparing costs processor time at the trainer."""
    weight_cuda_ipc: bool = False
    """Send weights from GPU to GPU within a host by CUDA IPC, if trainer and worker set it and the worker's GPU is the
    trainer's or has peer access to it. Needs `penstock[cuda]`. The trainer's GPU needs room for two or three copies of
    the weights; the worker's GPU needs room for one copy more than its engine holds. Not for vLLM and SGLang. Has not
    run on a GPU yet."""
    weight_disk: Path | None = None
    """Directory on a file system that the trainer and workers of other hosts share, for weights if these hosts cannot
    reach the trainer's bulk_host. It must exist, and be set at both ends (its path may differ). The trainer writes each
    version to a file there, and keeps two or three per job until the job ends; it waits for the file system, and needs
    memory for one more copy of the weights. While the directory is full or missing, only workers that need it wait."""
    bulk_bytes: int = Field(1 << 30, ge=1 << 20)
    """Largest amount of shared memory for the bulk data of this process (bytes)."""
    http_host: str = "127.0.0.1"
    """Bind address of the API (coordinator)."""
    http_port: int = 8000
    """Port of the API (coordinator); 0: any free port."""
    health_host: str = "127.0.0.1"
    """Bind address of /healthz, /readyz and /metrics of every process; these need no key."""
    health_port: int = 0
    """Port of /healthz, /readyz and /metrics; 0: any free port."""
    api_keys: str = ""
    """Comma-separated bearer keys with all permissions. If none is set, `penstock up` generates one:
    `DATA_DIR/api.key`."""
    open_loopback: bool = False
    """Without api_keys, allow every client all operations without a key. Only on a loopback address, and only if all
    users and programs of the machine are trusted (coordinator)."""
    forwarded_allow_ips: str = ""
    """Comma-separated addresses and networks of trusted proxies, or `*`, whose `X-Forwarded-For` and
    `X-Forwarded-Proto` headers name the client of a request (coordinator). Empty: none."""
    http_connections: int = Field(4096, ge=16)
    """Largest number of client connections (coordinator); fewer if the limit of open files of the process is lower.
    Further connections get 503."""
    http_connections_per_address: int = Field(1024, ge=1)
    """Largest number of connections per client address (IPv6: per /64); those of proxies in forwarded_allow_ips do
    not count."""
    http_head_bytes: int = Field(64 << 10, ge=1 << 10)
    """Largest size of the request line and all headers (bytes); larger ones get 431."""
    http_head_s: float = Field(10.0, gt=0)
    """Timeout of an idle connection, and of receiving the headers of a request (seconds; 408)."""
    http_body_s: float = Field(30.0, gt=0)
    """Timeout of receiving a request body (seconds; 408), plus one second per 16 KiB received."""
    key_concurrency: int = Field(1024, ge=1)
    """Largest number of concurrent requests per key, including event streams and long polls; further requests get 429.
    A request with an episode key or a feedback token counts for the API key that created it."""
    key_large_bodies: int = Field(4, ge=1)
    """Largest number of concurrent uploads of bodies above 1 MiB per key; further uploads wait for up to 10 s, then get
    429."""
    large_bodies: int = Field(32, ge=1)
    """Largest number of concurrent uploads of bodies above 1 MiB, all keys together."""
    tenant_share: float = Field(0.95, gt=0, le=1)
    """Largest share that one owner may use of the space that other owners leave free. In the bucket of opened episodes
    the owners are keys (507 beyond the share); in the stream of feedback they are jobs (429). Within the share of a
    job, one key may use 95 % of the space that the job's other keys leave."""
    lease_s: float = Field(3.0, gt=0.2)
    """Time without renewal of a lease (seconds) after which another coordinator or trainer may take it over."""
    heartbeat_s: float = Field(1.0, gt=0.05)
    """Interval of heartbeats (seconds)."""
    drain_s: float = Field(20.0, gt=0)
    """Time limit of finishing work after SIGTERM (seconds)."""
    log_files: bool = False
    """Also write the log to a file under data_dir/logs, where `GET /v1/jobs/{id}/logs` finds it if the coordinator
    has the same data_dir. `penstock up` always writes such files."""
    trainer_ranks: int = Field(1, ge=1, le=1024)
    """Number of processes that `penstock up` starts as ranks of one trainer, for sharded models (`backend` in the
    job file)."""
    rank_deadline_s: float = Field(600.0, gt=0)
    """Timeout of one rank of a trainer waiting for another, while models are built and in every collective
    (seconds)."""
    rank_silence_s: float = Field(60.0, gt=0)
    """Time without a heartbeat (seconds) after which a rank of a trainer is considered lost and all ranks restart.
    Steps may take longer: a computing rank keeps sending heartbeats."""
    code_modules: str = "*"
    """Comma-separated modules whose functions, tools and environments job files may name, including their
    submodules; `*`: all (coordinator). A key also needs the scope `jobs:code`, and may be restricted to fewer
    modules."""
    job_roots: str = ""
    """Comma-separated directories that must contain the data, models and tokenizers named in job files, symbolic
    links resolved (coordinator). Empty: keys with the scope admin may name any path. Other keys may name no
    path, only built-in data, models of a hub and checkpoints of jobs."""
    worker_env: str = ""
    """Comma-separated names of environment variables that `penstock up` passes to its workers, in addition to those
    they need; functions and tools of jobs see them. Other variables are not passed."""
    scorer_env: str = ""
    """Comma-separated names of environment variables of the reward service that scorers of a job may send to the
    address in the job file (`api_key_env`, `secret_env`). Empty: none."""
    scorer_private: bool = False
    """Allow scorers and judges of job files to connect to private, loopback and link-local addresses (reward).
    Processes that `penstock up` starts allow it by default. The address of grader_url is always allowed."""
    webhook_private: bool = False
    """Deliver webhooks to private, loopback and link-local addresses, too (coordinator)."""
    base_models: Path | None = None
    """Directory with a file `NAME.yaml` for each model that `/v1/fine_tuning/jobs` may name (coordinator): a partial
    job file that is completed with the data, reward and hyper-parameters of requests."""
    deploy_most: int = Field(4, ge=0)
    """Largest number of checkpoints deployed on request (`model: job:NAME@final`) at a time; 0: only those deployed
    with `penstock serve`."""
    deploy_idle_s: float = Field(600.0, gt=0)
    """Time without a request (seconds) after which a checkpoint deployed on request is no longer deployed."""
    files_bytes: int = Field(16 << 30, ge=1 << 20)
    """Largest total size of uploaded data sets (bytes; coordinator); more are refused."""
    max_files: int = Field(1000, ge=1)
    """Largest number of uploaded data sets (coordinator)."""
    grader_url: str = ""
    """Base address, including `/v1`, of an OpenAI-compatible service with the models that `score_model` graders in
    requests name (coordinator); empty: such graders are refused."""
    grader_key_env: str = ""
    """Name of the environment variable with the API key of grader_url; the reward service has the variable, and
    allows it in scorer_env."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    rate_limit: str = "600/minute"
    """Rate limit of API requests per key, in the notation of the library `limits`; replicas share it only with
    redis_url."""
    live_rate_limit: str = "60000/minute"
    """Rate limit of requests to models and of feedback, per key; other requests do not count in it. If a key has a rate
    limit of its own, the key's limit replaces both live_rate_limit and rate_limit."""
    user_rate_limit: str = ""
    """Rate limit of live requests and feedback items per key and end user, such as 60/minute. Empty: no limit."""
    token_rate_limit: str = ""
    """Rate limit of prompt and answer tokens per key, such as 1000000/minute. An answer is counted when it ends, so
    the last one may exceed the limit. Empty: no limit."""
    address_rate_limit: str = ""
    """Rate limit of API requests per client address (IPv6: per /64), with or without a valid key. Empty: no limit."""
    experience_bytes: int = Field(4 << 30, ge=1 << 20)
    """Size of the EXPERIENCE stream (bytes); a full stream refuses new messages. If neither this nor stream_bytes is
    set, `penstock up` keeps the sizes of existing streams and creates new ones as large as its disk allows, up to
    the default."""
    ledger_bytes: int | None = Field(None, ge=1 << 20)
    """Size of the LEDGER stream (bytes), which holds what jobs have not archived yet; default: stream_bytes. No job
    is accepted while it is almost full."""
    stream_bytes: int = Field(1 << 30, ge=1 << 20)
    """Size of each stream except EXPERIENCE and LEDGER (bytes). SNAPSHOTS, AUDIT, VIDEOS and PARTIAL get at most a
    quarter of it each."""
    stream_replicas: int = Field(1, ge=1, le=5)
    """NATS nodes that replicate each stream and bucket: 1, 3 or 5. Existing streams get more replicas if this is
    larger, and never fewer."""
    live_keep_s: float | None = Field(None, ge=2 * 86400)
    """Age (seconds) at which live interactions and feedback are removed (coordinator); default: only when space is
    needed. Must exceed every waiting time for them in job files."""
    audit_keep_s: float | None = Field(None, ge=86400)
    """Age (seconds) at which records of the audit log are removed (coordinator); default: only when their stream, of
    at most 256 MiB, needs space."""

    @field_validator("weight_disk", mode="before")
    @classmethod
    def _is_absolute(cls, value: object) -> Path | None:
        if value is None or value == "":  # as Compose passes a variable that is not set
            return None
        path = Path(str(value)).expanduser()
        if not path.is_absolute():
            raise ValueError(f"'{value}' must be an absolute path")
        return path

    @field_validator("stream_replicas")
    @classmethod
    def _has_majority(cls, replicas: int) -> int:
        if replicas % 2 == 0:
            raise ValueError("an even number of replicas survives no more than one fewer: use 1, 3 or 5")
        return replicas

    @property
    def nats_tls(self) -> ssl.SSLContext | None:
        """TLS context of connections to the bus; None if no variable `nats_tls_*` is set.

        Raises:
            ConfigError: a file cannot be read, or a certificate has no key.
        """
        return _tls_context("NATS", self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)

    @property
    def bulk_tls_client(self) -> ssl.SSLContext | None:
        """TLS context for fetching bulk data and weights of other hosts; None if no variable `bulk_tls_*` is set.
        Raises ConfigError."""
        return _tls_context("BULK", self.bulk_tls_ca, self.bulk_tls_cert, self.bulk_tls_key)

    @property
    def bulk_tls_server(self) -> ssl.SSLContext | None:
        """TLS context for serving bulk data and weights; None if no variable `bulk_tls_*` is set. If ``bulk_tls_ca`` is
        set, clients need a certificate.

        Raises:
            ConfigError: a file cannot be read, or the server certificate is missing.
        """
        return _tls_context("BULK", self.bulk_tls_ca, self.bulk_tls_cert, self.bulk_tls_key, serves=True)

    @property
    def vllm_interpreter(self) -> Path | None:
        """Interpreter that starts vLLM's server; None if it does not exist."""
        own = Path(sys.executable) if importlib.util.find_spec("vllm") is not None else None
        return self._interpreter("vllm", self.vllm_python or own)

    @property
    def sglang_interpreter(self) -> Path | None:
        """Interpreter that starts SGLang; None if it does not exist."""
        return self._interpreter("sglang", self.sglang_python)

    def _interpreter(self, environment: str, chosen: Path | None) -> Path | None:
        found = chosen or self.engines_dir.expanduser() / environment / "bin" / "python"
        return found if found.is_file() else None

    @property
    def engines(self) -> list[str]:
        """Names of the available rollout engines that run outside the worker's process: as its child, or at a URL."""
        has_sglang = self.sglang_url or self.sglang_interpreter is not None
        return [*(["vllm_server"] if self.vllm_interpreter is not None else []), *(["sglang"] if has_sglang else [])]

    @property
    def ledger_size(self) -> int:
        """Size of the LEDGER stream (bytes)."""
        return self.stream_bytes if self.ledger_bytes is None else self.ledger_bytes


def _tls_context(
    plane: str, ca: Path | None, cert: Path | None, key: Path | None, *, serves: bool = False
) -> ssl.SSLContext | None:
    """Build the TLS context of a client, or of a server if ``serves``, from the values of the variables
    ``PENSTOCK_<plane>_TLS_*``, where ``plane`` is NATS or BULK. Return None if none of them is set. Raises
    ConfigError."""
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
    """Read the settings of this service. Variables in ``environment`` take precedence over the variables of this
    process.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    variables = {f"PENSTOCK_{name.upper()}": name for name in ServiceSettings.model_fields}
    given: dict[str, Any] = {variables[key]: text for key, text in (environment or {}).items() if key in variables}
    try:
        return ServiceSettings(**given)
    except ValidationError as error:
        lines = [f"PENSTOCK_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError("environment is not valid:\n  " + "\n  ".join(lines)) from None


def recorded_path(data_dir: Path, path: Path) -> str:
    """Return the path of a checkpoint as ledgers record it: relative to the data directory, which may move."""
    return path.relative_to(data_dir).as_posix() if path.is_relative_to(data_dir) else str(path)


def checkpoint_path(data_dir: Path, recorded: str) -> Path:
    """Return the directory of the checkpoint recorded as ``recorded``.

    Ledgers of earlier versions recorded absolute paths. Of such a path only the part below the former data directory is
    used, so that a deployment whose data was moved or copied reads its own files.
    """
    path = Path(recorded)
    if path.is_absolute() and path.parts[-3:-2] == (CHECKPOINTS,):
        path = Path(*path.parts[-3:])
    return data_dir / path
