"""The in-memory broker: a model of a cluster with transactions, faults on order, and the interface that a real one
answers.

Scripted and random histories show that model and real broker answer alike.
"""
