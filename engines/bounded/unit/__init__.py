"""A unit of bounded work: one subtask of one task, what it reads, runs, stages and publishes, in whatever process.

May import what lies directly in `engines`, and `engines.bounded.ranges`.
"""
