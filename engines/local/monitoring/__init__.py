"""What a run shows of itself over HTTP: metrics, probes and a page.

Invariants: reporters gather it on the run's thread, other threads only read; nothing of it holds a secret or a record.
"""
