"""How a live request is sampled, and whether the trainer could repeat it. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import Sampling
from penstock.shared.protocol.inference import ClientSampling

__all__ = ["NOT_REPLAYABLE", "as_trained", "replayable", "sampling_for"]

NOT_REPLAYABLE = "sampling_not_replayable"


def sampling_for(
    config: SamplingConfig, client: ClientSampling, *, num_prompt: int, max_length: int, constrained: bool = False
) -> Sampling:
    """The client's wishes over the job's defaults; a default length is cut to what is left beside the prompt.

    A ``constrained`` answer ends where its form does, however short it is.

    Raises:
        ConfigError: prompt and completion are longer than the model takes.
    """
    room = max_length - num_prompt
    most = client.max_new_tokens if client.max_new_tokens is not None else max(1, min(config.max_new_tokens, room))
    if most > room:
        raise ConfigError(
            f"{num_prompt} prompt tokens and {most} new ones exceed the {max_length} that the model takes: "
            "shorten the prompt or lower max_tokens"
        )
    least = client.min_new_tokens if client.min_new_tokens is not None else config.min_new_tokens
    if constrained:
        least = 0
    return Sampling(
        max_new_tokens=most,
        min_new_tokens=min(least, most),
        temperature=config.temperature if client.temperature is None else client.temperature,
        top_p=1.0 if client.top_p is None else client.top_p,
        top_k=0 if client.top_k is None else client.top_k,
        frequency_penalty=client.frequency_penalty,
        presence_penalty=client.presence_penalty,
        logit_bias=tuple(client.logit_bias),
        stop_token_ids=tuple({*config.stop_token_ids, *client.stop_token_ids}),
        stop_strings=tuple(client.stop or config.stop),
        ignore_eos=client.ignore_eos or (config.ignore_eos and not constrained),
        seed=client.seed,
    )


def as_trained(client: ClientSampling) -> ClientSampling:
    """The client's wishes without those that would keep the trainer from repeating what was sampled.

    Its temperature is the job's already: the gateway says it, for workers that go on with an answer need the same one.
    """
    return replace(
        client, top_p=None, top_k=None, min_new_tokens=None, frequency_penalty=0.0,
        presence_penalty=0.0, logit_bias=[],
    )  # fmt: skip


def replayable(sampling: Sampling, config: SamplingConfig) -> bool:
    """True if the trainer's log-probs are of the distribution that was sampled: no truncation, no other temperature."""
    nudged = sampling.frequency_penalty or sampling.presence_penalty or sampling.logit_bias
    plain = sampling.top_p == 1 and sampling.top_k == 0 and not sampling.min_new_tokens and not nudged
    return plain and sampling.temperature == config.temperature
