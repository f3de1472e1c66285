"""The parts of a demonstration: a pipeline, input at an even pace, kills, and an independent count.

`exactlyonce demo` and the examples import them. May import `sinks` and everything below it.
"""
