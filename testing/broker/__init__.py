"""The broker in memory: a model of a cluster with transactions, and the interface that it shares with a real broker.

May import `testing.clock` and what lies below `testing`.
"""
