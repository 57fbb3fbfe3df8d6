"""Every stream, bucket and subject, as constants and functions. No other module spells one."""

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
    "POLICY",
    "PRIVACY",
    "RAW",
    "REPLAY",
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
TICKETS = "TICKETS"  # work queue: what asks for a draw
RAW = "RAW"  # work queue: generated groups that wait for a slow scorer
EXPERIENCE = "EXPERIENCE"  # scored groups
BATCHES = "BATCHES"  # sealed batches, derived from the ledger
LEDGER = "LEDGER"  # the only commit point
SNAPSHOTS = "SNAPSHOTS"  # folds of the ledger, so that a leader need not start at its first event
EVENTS = "EVENTS"  # what people see of a job: phases, checkpoints, warnings
METRICS = "METRICS"  # one row per update or evaluation
INTERACTIONS = "INTERACTIONS"  # live requests served to agents
FEEDBACK = "FEEDBACK"  # what arrives later about them
DECISIONS = "DECISIONS"  # what became of each item of feedback
DEAD = "DEAD"  # dead letters
VIDEOS = "VIDEOS"  # films of held-out episodes; the oldest make room
AUDIT = "AUDIT"  # who asked for what over HTTP

# Key-value buckets.
JOBS = "jobs"  # job records: the truth about what was asked for
POLICY = "policy"  # the policy clock of each job
MANIFESTS = "manifests"  # newest weight manifest of each job
EPISODES = "episodes"  # sessions of agents that were opened by request
KEYS = "keys"  # API keys: digests, scopes, expiry
PRIVACY = "privacy"  # the key of pseudonyms; what users consented to, and what was deleted of them
WEBHOOKS = "webhooks"  # where events are posted, and how far that is
LEASES = "leases"  # who may write: coordinator and trainer, with epochs
ANSWERS = "answers"  # which replica has which answer, and which episode a conversation is; entries expire

HEARTBEATS = "heartbeat.>"
ANNOUNCE = "weights.>"


def tickets(job: str) -> str:
    """Tickets of a job."""
    return f"tickets.{job}"


def raw(job: str) -> str:
    """Unscored groups of a job."""
    return f"raw.{job}"


def experience(job: str) -> str:
    """Scored groups of a job."""
    return f"experience.{job}"


def batches(job: str) -> str:
    """Sealed batches of a job."""
    return f"batches.{job}"


def ledger(job: str) -> str:
    """The ledger of a job."""
    return f"ledger.{job}"


def snapshots(job: str) -> str:
    """Snapshots of the ledger of a job."""
    return f"snapshots.{job}"


def events(job: str) -> str:
    """Events of a job."""
    return f"events.{job}"


def metrics(job: str) -> str:
    """Metric rows of a job."""
    return f"metrics.{job}"


def dead(job: str) -> str:
    """Dead letters of a job."""
    return f"dead.{job}"


def videos(job: str) -> str:
    """Films of held-out episodes of a job."""
    return f"videos.{job}"


def audit(key: str, job: str) -> str:
    """A request that a key sent about a job ('': about none)."""
    return f"audit.{token(key)}.{token(job)}"


def audits(key: str, job: str) -> str:
    """Those of one key ('': of all), about one job ('': about any, or none)."""
    return f"audit.{token(key) if key else '*'}.{token(job) if job else '*'}"


def interaction(job: str, interaction: str) -> str:
    """One interaction of a job: the newest message of this subject is its record."""
    return f"interactions.{job}.{token(interaction)}"


def interactions(job: str) -> str:
    """All interactions of a job."""
    return f"interactions.{job}.*"


def feedback(job: str) -> str:
    """Feedback of a job, in group commits."""
    return f"feedback.{job}"


def erasures(job: str) -> str:
    """Deletions among the interactions and the feedback of a job, in FEEDBACK."""
    return f"feedback.{job}.erased"


def feedback_ids(job: str) -> str:
    """Ids of feedback of a job that was decided and made room, in FEEDBACK."""
    return f"feedback.{job}.ids"


def decisions(job: str) -> str:
    """Outcomes of the feedback of a job."""
    return f"decisions.{job}"


def inference(job: str) -> str:
    """Requests of live clients to any rollout worker that serves the job (core NATS)."""
    return f"inference.{job}"


def inference_chunks(gateway: str) -> str:
    """Chunks of rollout workers for one HTTP gateway (core NATS)."""
    return f"inference.gateway.{token(gateway)}"


def inference_claims(gateway: str) -> str:
    """Request/reply: what one HTTP gateway asks of another one."""
    return f"inference.claims.{token(gateway)}"


def reading(job: str) -> str:
    """Request/reply to any rollout worker of a job: text to tokens, tokens to log-probs."""
    return f"reading.{job}"


def inference_worker(worker: str) -> str:
    """Notices of gateways to one rollout worker about requests that it has in hand (core NATS)."""
    return f"inference.worker.{token(worker)}"


def inference_present(worker: str) -> str:
    """Signs of life of the gateways that have requests at one rollout worker (core NATS)."""
    return f"inference.present.{token(worker)}"


def heartbeat(service: str, worker: str) -> str:
    """Heartbeats of one process (core NATS, may be lost)."""
    return f"heartbeat.{service}.{token(worker)}"


def base_manifest(job: str) -> str:
    """Key in MANIFESTS of the frozen weights under the adapters of a job, where workers cannot load them themselves."""
    return f"{job}.base"


def candidate_manifest(job: str) -> str:
    """Key in MANIFESTS of the newest version of a job with a promotion gate; the job's own key is what is served."""
    return f"{job}.candidate"


def weight_routes(job: str) -> str:
    """Key in MANIFESTS of the transports by which the workers of a job get their weights."""
    return f"{job}.routes"


def weights(job: str) -> str:
    """Announcements of new weights (core NATS; the manifest itself stands in the bucket)."""
    return f"weights.{job}"


def report(job: str) -> str:
    """Request/reply: what trainer and rollout workers tell the coordinator that leads the job."""
    return f"report.{job}"


def lost_weights(job: str) -> str:
    """Request/reply: a worker cannot open the version that the job's trainer announced."""
    return f"lost_weights.{job}"


def command(job: str) -> str:
    """Request/reply: what the coordinator asks of the job's trainer (checkpoint, drain)."""
    return f"command.{job}"


def evaluation(job: str) -> str:
    """Request/reply: results of evaluation prompts, to the coordinator that leads the job."""
    return f"evaluation.{job}"


HOLD = "coordinator.hold"  # request/reply: a backup asks the leader to give up nothing for a while
LEADER = "coordinator.leader"  # request/reply: what only the coordinator that leads can answer
REPLAY = "replay.request"  # request/reply to any trainer: repeat batches of a job


def replay_progress(request: str) -> str:
    """Rows of progress of one replay (core NATS)."""
    return f"replay.progress.{token(request)}"


def score(job: str) -> str:
    """Request/reply to the reward pool: score the completions of a group."""
    return f"score.{job}"


SCALE = "supervisor.scale"
"""Request/reply to whoever starts the processes: have that many workers of a service."""

GRADE = "grade.request"
"""Request/reply to the reward pool: grade one answer outside of any job."""

ENV_OPEN = "env.open"
"""Request/reply to the env pool: open a session of simulators; answered by whoever is free."""
ENV_DESCRIBE = "env.describe"
"""Request/reply to the env pool: make a simulator, begin an episode, and say what it is like."""


def env(session: str) -> str:
    """Request/reply to the process that holds a session: step its simulators, or go on with its episodes."""
    return f"env.session.{token(session)}"


def tools(job: str) -> str:
    """Request/reply to the env pool: carry out one call of a tool of the job."""
    return f"env.tools.{job}"


def token(name: str) -> str:
    """``name`` as one subject token."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name) or "-"
