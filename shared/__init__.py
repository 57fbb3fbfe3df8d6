"""Code that all services share: wire contracts, configuration, transports, weights, models, data, sandboxes,
algorithms, and the life cycle of a service process.

Imports go one way:
``(runtime | weights | algorithms | models | data | sandbox) > transport > config > protocol > errors``.
"""
