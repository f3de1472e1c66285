"""The units of bounded work, in any process: a subtask's work, a publication, and an audit's partitions and lanes.

Inputs and outputs of units are staged files: `staging` has their format and their places.

May import modules directly in `engines`.
"""
