"""The shared kernel: wire contracts, configuration, transports, weights, maths and the life of a service.

Imports go one way:
``(runtime | weights | algorithms | models | data | sandbox) > transport > config > protocol > errors``.
"""
