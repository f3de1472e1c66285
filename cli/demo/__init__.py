"""The parts of a demonstration: a pipeline, input at an even pace, kills, and an independent count.

`exactlyonce demo` and `examples/demo.py` import them. May import `connectors` and `pipeline`.
"""
