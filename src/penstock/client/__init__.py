"""Python client of the API: ``Client`` blocks, ``AsyncClient`` is for asyncio; both have the same methods.

::

    with Client() as client:                       # PENSTOCK_URL, PENSTOCK_API_KEY
        job = client.submit(Path("job.yaml"))
        for event in client.events(job.id):        # reconnects and resumes by itself
            ...
        print(client.get(job.id).status.reward)

        receipt = client.feedback("accepted", True, inference=answer.id)
        print(client.feedback_status(receipt.feedback_id).status)

Results are typed: ``JobRecord``, and the structs of ``penstock.client.results``.
"""

from penstock.client.asynchronous import AsyncClient
from penstock.client.synchronous import Client

__all__ = ["AsyncClient", "Client"]
