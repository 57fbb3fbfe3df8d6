"""Webhooks: signed job events that the coordinator posts to users' addresses, in order and at least once.

The folder owns the bucket `webhooks` (addresses, secrets, and the position that each webhook has reached), the bodies,
signatures and attempts of deliveries. Callers: `service` runs the ``Courier`` in the leading coordinator; the routes of
`api/` change webhooks in any replica, through the ``WebhookStore`` of `services`. It imports nothing else of the
coordinator.
"""
