"""The surroundings of a pipeline: the topics that it reads and writes, and the stores, as its leader asks for them.

May import `connectors`, `sinks`, `checkpoint` and `pipeline`; knows no engine.
"""
