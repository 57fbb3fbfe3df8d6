"""Execution of untrusted programs: no network, no writes outside a private directory, bounded, killable as a whole.

``sandbox.py`` is the handle in the process that runs programs. It starts ``warden.py``, which confines itself
(namespaces) and forks one ``runner.py`` per run; the runner drops its remaining rights (``confine.py``) before it reads
the program.
"""
