"""What a run shows of itself over HTTP: metrics, probes and a page.

Invariants: reporters gather it on the run's thread, other threads only read; nothing of it holds a secret or a record.
May import `engines.plan`, `engines.pending_output` and, of `engines.local`, its messages and the seam of reporters.
"""
