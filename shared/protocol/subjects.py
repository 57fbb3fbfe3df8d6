"""All streams, buckets and subjects, as constants and functions. Other modules contain no subject literals."""

from __future__ import annotations

__all__ = [
    "ANNOUNCE",
    "ANSWERS",
    "AUDIT",
    "BATCHES",
    "DEAD",
    "DECISIONS",
    "ENV_DESCRIBE",
    "ENV_OPEN",
    "ENV_TRY",
    "EPISODES",
    "EVENTS",
    "EXPERIENCE",
    "FEEDBACK",
    "GRADE",
    "HEARTBEATS",
    "HOLD",
    "INTERACTIONS",
    "JOBS",
    "KEYS",
    "LEADER",
    "LEASES",
    "LEDGER",
    "MANIFESTS",
    "METRICS",
    "PARTIAL",
    "POLICY",
    "PRIVACY",
    "RAW",
    "REPLAY",
    "ROLLOUT_TRY",
    "SCALE",
    "SNAPSHOTS",
    "TICKETS",
    "VIDEOS",
    "WEBHOOKS",
    "audit",
    "audits",
    "base_manifest",
    "batches",
    "candidate_manifest",
    "command",
    "dead",
    "decisions",
    "env",
    "erasures",
    "evaluation",
    "events",
    "experience",
    "feedback",
    "feedback_ids",
    "heartbeat",
    "inference",
    "inference_chunks",
    "inference_claims",
    "inference_present",
    "inference_worker",
    "interaction",
    "interactions",
    "ledger",
    "metrics",
    "partial",
    "partials",
    "raw",
    "reading",
    "replay_progress",
    "report",
    "score",
    "snapshots",
    "tickets",
    "tools",
    "videos",
    "weights",
]

# Streams (JetStream, file storage).
TICKETS = "TICKETS"  # work queue: tickets, one per draw
RAW = "RAW"  # work queue: generated groups for a slow scorer
EXPERIENCE = "EXPERIENCE"  # scored groups
BATCHES = "BATCHES"  # sealed batches, derived from the ledger
LEDGER = "LEDGER"  # the only commit point
SNAPSHOTS = "SNAPSHOTS"  # states of the ledger, so that a new leader need not fold all events
EVENTS = "EVENTS"  # events of a job for users: phases, checkpoints, warnings
METRICS = "METRICS"  # one row per update or evaluation
INTERACTIONS = "INTERACTIONS"  # live requests served to agents
FEEDBACK = "FEEDBACK"  # feedback on live requests
DECISIONS = "DECISIONS"  # status of each item of feedback
DEAD = "DEAD"  # dead letters
VIDEOS = "VIDEOS"  # films of held-out episodes; the oldest are removed for new ones
PARTIAL = "PARTIAL"  # completions in progress, with which another worker goes on; a cache
AUDIT = "AUDIT"  # HTTP requests and their senders

# Key-value buckets.
JOBS = "jobs"  # job records: the desired state of each job
POLICY = "policy"  # the policy clock of each job
MANIFESTS = "manifests"  # newest weight manifest of each job
EPISODES = "episodes"  # sessions of agents, opened by request
KEYS = "keys"  # API keys: digests, scopes, expiry
PRIVACY = "privacy"  # key of pseudonyms; consent and deletions of users
WEBHOOKS = "webhooks"  # webhooks with their delivery state
LEASES = "leases"  # leases of coordinators and trainers, with epochs
ANSWERS = "answers"  # replica of each answer, episode of each conversation; entries expire

HEARTBEATS = "heartbeat.>"
ANNOUNCE = "weights.>"


def tickets(job: str) -> str:
    """Return the subject of the tickets of a job."""
    return f"tickets.{job}"


def raw(job: str) -> str:
    """Return the subject of the unscored groups of a job."""
    return f"raw.{job}"


def partial(job: str, key: str, place: int) -> str:
    """Return the subject of one unfinished completion. ``key`` names the ticket, and ``place`` is the index of the
    completion in the ticket's group. The stream keeps only the newest message of the subject."""
    return f"partial.{job}.{token(key)}.{place}"


def partials(job: str) -> str:
    """Return a filter for all unfinished completions of a job."""
    return f"partial.{job}.*.*"


def experience(job: str) -> str:
    """Return the subject of the scored groups of a job."""
    return f"experience.{job}"


def batches(job: str) -> str:
    """Return the subject of the sealed batches of a job."""
    return f"batches.{job}"


def ledger(job: str) -> str:
    """Return the subject of the ledger of a job."""
    return f"ledger.{job}"


def snapshots(job: str) -> str:
    """Return the subject of the ledger snapshots of a job."""
    return f"snapshots.{job}"


def events(job: str) -> str:
    """Return the subject of the events of a job."""
    return f"events.{job}"


def metrics(job: str) -> str:
    """Return the subject of the metric rows of a job."""
    return f"metrics.{job}"


def dead(job: str) -> str:
    """Return the subject of the dead letters of a job."""
    return f"dead.{job}"


def videos(job: str) -> str:
    """Return the subject of the videos of held-out episodes of a job."""
    return f"videos.{job}"


def audit(key: str, job: str) -> str:
    """Return the subject of the audit records of requests that ``key`` sent about ``job`` ('': about no job)."""
    return f"audit.{token(key)}.{token(job)}"


def audits(key: str, job: str) -> str:
    """Return a filter for audit records of requests of one key ('': of all keys) about one job ('': about any or no
    job)."""
    return f"audit.{token(key) if key else '*'}.{token(job) if job else '*'}"


def interaction(job: str, interaction: str) -> str:
    """Return the subject of one interaction of a job. The newest message on the subject is the interaction's record."""
    return f"interactions.{job}.{token(interaction)}"


def interactions(job: str) -> str:
    """Return a filter for all interactions of a job."""
    return f"interactions.{job}.*"


def feedback(job: str) -> str:
    """Return the subject of the feedback of a job; each message has the items that were stored together in one
    write."""
    return f"feedback.{job}"


def erasures(job: str) -> str:
    """Return the subject, in stream FEEDBACK, of the records of deleted interactions and feedback of a job."""
    return f"feedback.{job}.erased"


def feedback_ids(job: str) -> str:
    """Return the subject, in stream FEEDBACK, of the ids of a job's feedback that was decided and then removed from the
    stream."""
    return f"feedback.{job}.ids"


def decisions(job: str) -> str:
    """Return the subject of the feedback statuses of a job."""
    return f"decisions.{job}"


def inference(job: str) -> str:
    """Return the subject of live requests to any rollout worker that serves the job (core NATS)."""
    return f"inference.{job}"


def inference_chunks(gateway: str) -> str:
    """Return the subject of chunks from rollout workers to one HTTP gateway (core NATS)."""
    return f"inference.gateway.{token(gateway)}"


def inference_claims(gateway: str) -> str:
    """Return the subject of requests from other HTTP gateways to take over answers of one gateway (request/reply)."""
    return f"inference.claims.{token(gateway)}"


def reading(job: str) -> str:
    """Return the subject of requests for tokenization and for log-probs, which any rollout worker of the job answers
    (request/reply)."""
    return f"reading.{job}"


def inference_worker(worker: str) -> str:
    """Return the subject of notices from gateways to one rollout worker about its running requests (core NATS)."""
    return f"inference.worker.{token(worker)}"


def inference_present(worker: str) -> str:
    """Return the subject of heartbeats of the gateways that have requests at one rollout worker (core NATS)."""
    return f"inference.present.{token(worker)}"


def heartbeat(service: str, worker: str) -> str:
    """Return the subject of heartbeats of one process (core NATS, may be lost)."""
    return f"heartbeat.{service}.{token(worker)}"


def base_manifest(job: str) -> str:
    """Return the key in MANIFESTS of the base weights that a job's adapters extend. A rollout worker loads them if its
    engine was started with different base weights."""
    return f"{job}.base"


def candidate_manifest(job: str) -> str:
    """Return the key in MANIFESTS of the newest version of a job with a promotion gate; the key of its served version
    is ``job``."""
    return f"{job}.candidate"


def weight_routes(job: str) -> str:
    """Return the key in MANIFESTS of the transports by which the workers of a job receive weights."""
    return f"{job}.routes"


def weights(job: str) -> str:
    """Return the subject of announcements of new weights (core NATS; the manifest itself is in the bucket)."""
    return f"weights.{job}"


def report(job: str) -> str:
    """Return the subject of reports from trainer and rollout workers to the job's leading coordinator
    (request/reply)."""
    return f"report.{job}"


def lost_weights(job: str) -> str:
    """Return the subject of notices from rollout workers that cannot open a version. The trainer then publishes the
    version again (request/reply)."""
    return f"lost_weights.{job}"


def command(job: str) -> str:
    """Return the subject of ``Command`` messages from the coordinator to the job's trainer (request/reply)."""
    return f"command.{job}"


def evaluation(job: str) -> str:
    """Return the subject of results of evaluation prompts, to the job's leading coordinator (request/reply)."""
    return f"evaluation.{job}"


HOLD = "coordinator.hold"  # request/reply: a backup asks the leader to remove nothing for a while
LEADER = "coordinator.leader"  # request/reply: queries that only the leading coordinator can answer
REPLAY = "replay.request"  # request/reply to any trainer: replay batches of a job


def replay_progress(request: str) -> str:
    """Return the subject of progress rows of one replay (core NATS)."""
    return f"replay.progress.{token(request)}"


def score(job: str) -> str:
    """Return the subject of requests to the reward pool to score completions of a job (request/reply)."""
    return f"score.{job}"


SCALE = "supervisor.scale"
"""Subject of requests to the supervisor to set the number of workers of a service (request/reply)."""

GRADE = "grade.request"
"""Subject of requests to the reward pool to grade one answer outside of any job (request/reply)."""

ENV_OPEN = "env.open"
"""Subject of requests to the env pool to open a session of simulators (request/reply); any free worker answers."""
ENV_DESCRIBE = "env.describe"
"""Subject of requests to the env pool to open a simulator, begin an episode, and describe it (request/reply)."""
ENV_TRY = "env.try"
"""Subject of requests to the env pool to try tools or an environment of a user, outside of any job (request/reply)."""

ROLLOUT_TRY = "rollout.try"
"""Subject of requests to any rollout worker to try code that it would import, outside of any job (request/reply)."""


def env(session: str) -> str:
    """Return the subject of requests to the env worker that holds a session: to reset and step its simulators, or to
    continue an episode whose state it holds (request/reply)."""
    return f"env.session.{token(session)}"


def tools(job: str) -> str:
    """Return the subject of requests to the env pool to execute a tool call of the job (request/reply)."""
    return f"env.tools.{job}"


def token(name: str) -> str:
    """Return ``name`` escaped for use as one token of a NATS subject."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name) or "-"
