"""The local engine: one coordinator process, worker processes, channels between them, barriers among the records.

`job` runs in the coordinator, `worker` in each worker, `messages` is all that they say to each other. May import
`engines` and `engines.bounded`; never `engines.spark`.

`monitoring/` serves what a run shows of itself: a page, metrics, probes.
"""
