"""The leader of a job: reads its streams, decides, writes the ledger and publishes the effects of its decisions.

The folder owns everything that a job needs one leader for: tickets, batches, evaluations, the status record, the served
version, routes of weights, and the dead letters. `service` starts one leader per job in the leading coordinator;
`queries/`, `feedback/` and `online/` use its requests between coordinators, its explanations of waiting jobs and its
dead letters. It imports `training/`, `jobs/` and `trackers/`, and never a folder that depends on it: the supply of an
online job is passed in, behind the protocol ``training.supply.Supply``.
"""
