"""Penstock's training step: ``Learner.update`` on given groups, without services.

python -m steps.penstock_step WORKLOAD MODEL [--threads 2] [--device cpu] [--dtype float32]
"""

from __future__ import annotations

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from steps.groups import groups_of, job
from steps.options import note, options, parser, turns_on
from steps.workload import BATCH_FILE, WORKLOADS, Batch


def main() -> None:
    """Make steps when told to."""
    args = options(parser())
    turns, updates = turns_on(args.device), 0
    batch = Batch.read(args.model / BATCH_FILE)
    learner = Learner(job(WORKLOADS[args.workload], model=args.model, dtype=args.dtype), device=args.device)
    shard = BatchShard.whole(groups_of(batch))
    forwarded = sum(batch.lengths())
    while turns.begin():
        facts = learner.update(shard, update_index=updates)
        turns.end()
        updates += 1
        loss, norm = facts["loss/total"], facts["optimizer/grad_norm"]
        note(turns, args.device, loss=loss, grad_norm=norm, forwarded=forwarded)


if __name__ == "__main__":
    main()
