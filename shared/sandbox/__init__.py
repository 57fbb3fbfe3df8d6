"""Execution of untrusted programs: no network, writes only to a private directory, bounded resources, and no process
survives a run.

``sandbox.py`` is the handle in the process that has programs run. It starts ``warden.py``, which confines itself
(namespaces) and forks one ``runner.py`` per run; the runner drops its remaining rights (``confine.py``) before it reads
the program.
"""
