"""Dead messages of a work queue: in the end each is found, and a leased message never counts as dead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.coordinator.leader.dead_letters import Suspects

RIPE_S = 10.0


@given(
    st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), st.data(), st.integers(0, 3), st.floats(0, 100)
)  # fmt: skip
def test_only_dead_messages_are_found(
    dead: set[int], leased: set[int], data: st.DataObject, acknowledged: int, later: float
) -> None:
    """``acknowledged``: number of leases that ended between the count and the list."""
    leased -= dead
    holds = data.draw(st.sets(st.sampled_from(sorted(leased)))) if leased else set()
    suspects = Suspects()
    delivered = {seq: str(seq) for seq in dead | leased}
    arguments = {"num_leased": len(leased) + acknowledged, "held": {str(seq) for seq in holds}, "ripe_s": RIPE_S}
    assert suspects.dead(delivered, now=0.0, **arguments) == [], "not when first seen"
    again = suspects.dead(delivered, now=later, **arguments)
    assert again in ([], sorted(dead))
    if dead and holds == leased and not acknowledged and later > RIPE_S:
        assert again == sorted(dead)


def test_a_message_that_comes_back_under_lease_is_no_suspect() -> None:
    suspects = Suspects()
    assert suspects.dead({1: "a", 2: "b"}, num_leased=1, held={"b"}, now=0.0, ripe_s=RIPE_S) == []
    assert suspects.dead({1: "a", 2: "b"}, num_leased=2, held={"b"}, now=9.0, ripe_s=RIPE_S) == []
    assert suspects.dead({1: "a", 2: "b"}, num_leased=1, held={"b"}, now=11.0, ripe_s=RIPE_S) == [], "starts again"
    assert suspects.dead({1: "a", 2: "b"}, num_leased=1, held={"b"}, now=22.0, ripe_s=RIPE_S) == [1]
