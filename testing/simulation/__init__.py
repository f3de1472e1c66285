"""One pipeline in one process: the shipped coordinator and workers over the broker in memory, step by step.

`world` has the threads and the clock, `coordinator` and `processes` the hosts of the shipped job and worker, `clients`
and `answers` the stand-ins for client libraries, `faults` the seams to all that can go wrong. Only the broker, the
clock and the processes are simulated. `exactlyonce.testing.exactly_once` runs users' pipelines in it, and
`tests/simulation` the histories that are drawn from seeds. May import everything but `cli` and `views`.
"""
