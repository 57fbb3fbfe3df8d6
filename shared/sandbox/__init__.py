"""Runs programs that nobody trusts: no network, no writes outside a private directory, bounded, killable as a whole.

``sandbox.py`` is the handle in the process that wants programs run. It starts ``warden.py``, which confines itself
(``namespaces.py``) and forks one ``runner.py`` for each run; that one gives up what is left (``confine.py``) before it
sees the program.
"""
