"""The broker in memory: a model of a cluster with transactions, faults on order, and the interface of both brokers.

Histories of steps, played on the model and on a real broker, show that both answer alike. May import `testing.clock`
and what lies below `testing`.
"""
