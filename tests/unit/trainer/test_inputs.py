"""Prefetch of batches, and the checks that a trainer makes on each group."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from penstock.services.trainer.batch.inputs import BatchInputs, Untrainable, completions, decoder_of, fetch_shard
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.errors import DeadlineError, Unavailable
from penstock.shared.models.episode_policy import build_policy
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.embodied.episode_group import encode_episode_group
from penstock.shared.protocol.events import SealedGroup
from penstock.shared.protocol.frame import decode_frame, encode_frame
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.messages import BatchManifest
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import Group, encode_group, group_headers, parse_group_header
from penstock.shared.transport.bus import Bus
from tests.unit.trainer.episode_batches import CHUNK, group_of, job_of, spec_of

DECODE = partial(completions, temperature=1.0)


@pytest.mark.parametrize("error", [Unavailable("no bus"), DeadlineError("no answer"), Untrainable([], "gone")])
async def test_a_batch_whose_prefetch_found_no_bus_is_fetched_again(bus: Bus, error: Exception) -> None:
    async def failed() -> BatchShard[Group]:
        raise error

    inputs = BatchInputs(bus, "job_1", lambda manifest: [], max_lag=1, decode=DECODE, last_trained=0)
    manifest = BatchManifest(number=1, revision=1, start_version=0, update_index=0, groups=[])
    inputs._fetching[1, 1] = asyncio.create_task(failed())
    if isinstance(error, Untrainable):
        with pytest.raises(Untrainable):
            await inputs.shard(manifest)
    else:
        assert (await inputs.shard(manifest)).groups == []


async def test_groups_of_earlier_versions_are_trained_at_the_temperature_of_the_job(bus: Bus) -> None:
    """Groups of earlier versions record no temperature, nor do their headers, nor do old ledger entries."""
    group = Group(
        job="job_1", draw=Draw(0), attempt="a", epoch=1, prompt_ids=np.array([1], np.int32),
        token_ids=np.array([2], np.int32), cu_seqlens=np.array([0, 1], np.int32), logprobs=np.zeros(1, np.float32),
        mask=np.ones(1, np.uint8), rewards=np.ones(1, np.float32), failed=np.zeros(1, np.bool_),
        finish=np.zeros(1, np.uint8), spans=np.array([[0, 0, 0, 1]], np.int32), temperature=0.2,
    )  # fmt: skip
    own, header = encode_group(group)
    tree = decode_frame(own)
    assert isinstance(tree, dict)
    del tree["temperature"]
    old = b"".join(encode_frame(tree))
    sealed = []
    for data, temperature in ((old, None), (old, 0.5), (own, None), (own, 0.2)):
        seq = await bus.publish(subjects.experience("job_1"), data)
        digest = xxhash.xxh3_128_hexdigest(data)
        sealed.append(SealedGroup(Draw(0), "a", seq, digest, 0, 0, [1.0], 1, "w", temperature=temperature))
    manifest = BatchManifest(number=1, revision=1, start_version=0, update_index=0, groups=sealed)
    shard = await fetch_shard(bus, manifest, range(4), max_lag=1, decode=partial(completions, temperature=0.7))
    assert [found.temperature for found in shard.groups] == [0.7, 0.5, 0.2, 0.2]

    [(name, text)] = group_headers(header).items()
    fields = msgspec.json.decode(text)
    assert parse_group_header({name: msgspec.json.encode(fields).decode()}).temperature == 0.2
    assert parse_group_header({name: msgspec.json.encode(fields[:-4]).decode()}).temperature is None


async def sealed_as(bus: Bus, version: int, *, stored: bytes = b"") -> BatchManifest:
    """Store a group of ``version``, or ``stored`` in its place; return a manifest of batch 1 that seals the group."""
    group = Group(
        job="job_1", draw=Draw(4), attempt="a", epoch=1, prompt_ids=np.array([1], np.int32),
        token_ids=np.array([2], np.int32), cu_seqlens=np.array([0, 1], np.int32), logprobs=np.zeros(1, np.float32),
        mask=np.ones(1, np.uint8), rewards=np.ones(1, np.float32), failed=np.zeros(1, np.bool_),
        finish=np.zeros(1, np.uint8), spans=np.array([[0, version, 0, 1]], np.int32),
    )  # fmt: skip
    data, header = encode_group(group)
    seq = await bus.publish(subjects.experience("job_1"), stored or data)
    sealed = SealedGroup(Draw(4), "a", seq, header.digest, 3, 3, [1.0], 1, "w", temperature=1.0)  # the leader erred
    return BatchManifest(number=1, revision=1, start_version=3, update_index=0, groups=[sealed])


async def test_a_trainer_refuses_a_group_beyond_the_lag_bound_whoever_sealed_it(bus: Bus) -> None:
    assert (await fetch_shard(bus, await sealed_as(bus, 2), [0], max_lag=1, decode=DECODE)).groups
    with pytest.raises(Untrainable, match="from version 1") as refused:
        await fetch_shard(bus, await sealed_as(bus, 1), [0], max_lag=1, decode=DECODE)
    assert refused.value.bad == [Draw(4)]


async def test_a_trainer_refuses_bytes_that_were_not_sealed(bus: Bus) -> None:
    """The bytes decode and name the right draw, but somebody wrote them in place of the judged group."""
    other = await sealed_as(bus, 3)
    [message] = (await bus.get_whole(subjects.EXPERIENCE, [other.groups[0].seq])).values()
    tree = decode_frame(message.data)
    assert isinstance(tree, dict)
    forged = b"".join(encode_frame({**tree, "rewards": np.array([100.0], np.float32)}))
    with pytest.raises(Untrainable, match="do not hash to the sealed digest") as refused:
        await fetch_shard(bus, await sealed_as(bus, 3, stored=forged), [0], max_lag=1, decode=DECODE)
    assert refused.value.bad == [Draw(4)]


async def test_a_trainer_refuses_a_group_of_another_draw_or_without_prompt(bus: Bus) -> None:
    valid = await sealed_as(bus, 3)
    [sealed] = valid.groups
    other = replace(valid, groups=[replace(sealed, draw=Draw(5))])
    with pytest.raises(Untrainable, match=r"it is draw 4\.0"):
        await fetch_shard(bus, other, [0], max_lag=1, decode=DECODE)
    [message] = (await bus.get_whole(subjects.EXPERIENCE, [sealed.seq])).values()
    tree = decode_frame(message.data)
    assert isinstance(tree, dict)
    data = b"".join(encode_frame({**tree, "prompt_ids": np.zeros(0, np.int32)}))
    seq = await bus.publish(subjects.experience("job_1"), data)
    empty = replace(valid, groups=[replace(sealed, seq=seq, digest=xxhash.xxh3_128_hexdigest(data))])
    with pytest.raises(Untrainable, match="its prompt is empty"):
        await fetch_shard(bus, empty, [0], max_lag=1, decode=DECODE)


async def episodes_sealed_as(bus: Bus, objective: Objective) -> BatchManifest:
    """Store a group of episodes of version 1; return a manifest of batch 1 (start version 3) that seals it."""
    policy = build_policy(job_of().policy, spec_of(), action_chunk=CHUNK, seed=0)
    group = group_of(policy, 4, version=1, objective=objective)
    data, header = encode_episode_group(group)
    seq = await bus.publish(subjects.experience("job_1"), data)
    sealed = SealedGroup(Draw(4), "a", seq, header.digest, 1, 1, header.rewards, 8, "w", objective)
    return BatchManifest(number=1, revision=1, start_version=3, update_index=0, groups=[sealed])


async def test_a_trainer_reads_episodes_and_bounds_their_lag_unless_they_are_for_a_buffer(bus: Bus) -> None:
    for objective, lag in (("policy", 2), ("replay", 0)):
        manifest = await episodes_sealed_as(bus, objective)
        shard = await fetch_shard(bus, manifest, [0], max_lag=lag, decode=decoder_of(job_of()))
        assert shard.groups[0].lengths.tolist() == [5, 3]
        assert shard.objectives == (objective,)
    with pytest.raises(Untrainable, match="from version 1") as refused:
        await fetch_shard(bus, await episodes_sealed_as(bus, "policy"), [0], max_lag=1, decode=decoder_of(job_of()))
    assert refused.value.bad == [Draw(4)]
    with pytest.raises(Untrainable, match="not a group of episodes"):
        await fetch_shard(bus, await sealed_as(bus, 3), [0], max_lag=1, decode=decoder_of(job_of()))


async def test_of_all_manifests_of_a_batch_the_newest_leaders_highest_revision_counts(bus: Bus) -> None:
    inputs = BatchInputs(bus, "job_1", lambda manifest: [], max_lag=1, decode=DECODE, last_trained=0)
    following = asyncio.create_task(inputs.run())

    async def announce(number: int, revision: int, epoch: int) -> None:
        manifest = BatchManifest(number=number, revision=revision, start_version=epoch, update_index=0, groups=[])
        await bus.publish(subjects.batches("job_1"), pack(manifest, job="job_1", epoch=epoch))

    async def taken(number: int) -> BatchManifest:
        async with asyncio.timeout(30):
            while (found := inputs.peek(number)) is None:
                await inputs.arrived.wait()
                inputs.arrived.clear()
            return found

    await announce(1, 2, epoch=5)
    await announce(1, 1, epoch=5)  # stored later
    await announce(1, 3, epoch=4)  # of a leader that lost its lease
    await announce(2, 1, epoch=5)
    await taken(2)
    first = inputs.peek(1)
    assert first is not None
    assert (first.revision, first.start_version) == (2, 5)
    inputs.refused(first)
    await announce(1, 2, epoch=5)
    await announce(3, 1, epoch=5)
    await taken(3)
    assert inputs.peek(1) is None, "it was refused, and the leader seals a higher revision"
    await announce(1, 3, epoch=5)
    assert (await taken(1)).revision == 3
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
