"""The broker in memory: a model of a cluster with transactions, faults on order, and the interface of both brokers.

Scripted and random histories show that model and real broker answer alike. May import `testing.clock` and what lies
below `testing`.
"""
