"""One pipeline in one process: the shipped coordinator and workers over the broker in memory, step by step.

`world` has the threads, the clock, the seams to all that can go wrong, and the host of the shipped worker;
`coordinator` hosts the shipped job; there and in `clients` are the stand-ins for client libraries. Only the broker, the
clock and the processes are simulated. `exactlyonce.testing.exactly_once` runs users' pipelines in it, and
`tests/simulation` the histories that are drawn from seeds. May import everything but `cli` and `views`.
"""
