"""The records of the checkpoint topic: their fields, their bytes, and the history that they make. Pure.

May import `pipeline` and nothing else of `checkpoint`.
"""
