"""Feedback on live interactions: stored durably, indexed, and deleted on request.

The folder owns the way of an item from its request body into the stream FEEDBACK, the index of items and their
statuses (a SQLite file that the streams can rebuild), the quarantine as the API shows it, pseudonyms and consents of
users (bucket `privacy`), and deletions of a user's data. It does not decide which item is trained on: `online/` does.

Callers: the routes of `api/`, through the ``FeedbackService`` that `service` creates and keeps running; `serving/` asks
it for objections of users, `online/` for consents, deletions and ids of purged items. It uses `jobs/`, `training/`, the
dead letters of `leader/`, and the modules `auth`, `payload` and `shares`; it never imports `api/`,
`finetuning/`, `online/`, `queries/` or `serving/`.
"""
