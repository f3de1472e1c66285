"""The checks of what lies outside of a pipeline, for its leader: the topics that it reads and writes, and the stores.

May import `connectors`, `sinks`, `checkpoint` and `pipeline`; knows no engine.
"""
