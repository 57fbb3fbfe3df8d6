"""The Python client of the API: ``Client`` blocks, ``AsyncClient`` awaits; both have the same methods.

::

    with Client() as client:                       # PENSTOCK_URL, PENSTOCK_API_KEY
        job = client.submit(Path("job.yaml"))
        for event in client.events(job.id):        # resumes by itself
            ...
        print(client.get(job.id).status.reward)

        said = client.feedback("accepted", True, inference=answer.id)
        print(client.feedback_status(said.feedback_id).status)

What comes back has types: ``JobRecord``, and the structs of ``penstock.client.results``.
"""

from penstock.client.asynchronous import AsyncClient
from penstock.client.synchronous import Client

__all__ = ["AsyncClient", "Client"]
