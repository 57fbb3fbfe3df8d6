"""What the API answers about live agents and what was sampled, as values with types.

Frozen structs, for both clients: the attribute that you misspell is found by mypy and by Python, and a reply that does
not fit is a ProtocolError where it is read. Keys that a struct does not have are left out, and words that the server
may add to (a status, a reason) are plain strings: a newer server does not break an older client. Times are Unix seconds
or datetimes, as the API has them.

Jobs are ``penstock.shared.protocol.jobs.JobRecord``. Views whose columns the services decide (workers, waits, metrics,
events, checkpoints, the audit) are JSON objects as they come.
"""

from penstock.client.results.feedback import (
    Accepted,
    Consent,
    Erasure,
    Fate,
    FeedbackToken,
    Funnel,
    FunnelRow,
    ItemReply,
    OutcomeRow,
    Retracted,
    Trained,
)
from penstock.client.results.serving import (
    Decision,
    Episode,
    EpisodeKey,
    Interaction,
    KeptCheckpoint,
    Model,
    ModelVersion,
    NewEpisode,
    Redacted,
    Span,
    ToolCall,
    Trial,
    Versions,
)
from penstock.client.results.views import LogLine, MetricName, Sample, StageSpan, TokenSample

__all__ = [
    "Accepted",
    "Consent",
    "Decision",
    "Episode",
    "EpisodeKey",
    "Erasure",
    "Fate",
    "FeedbackToken",
    "Funnel",
    "FunnelRow",
    "Interaction",
    "ItemReply",
    "KeptCheckpoint",
    "LogLine",
    "MetricName",
    "Model",
    "ModelVersion",
    "NewEpisode",
    "OutcomeRow",
    "Redacted",
    "Retracted",
    "Sample",
    "Span",
    "StageSpan",
    "TokenSample",
    "ToolCall",
    "Trained",
    "Trial",
    "Versions",
]
