"""A unit of bounded work: one subtask of one task in any process, its inputs, its staged files and its publication.

May import modules directly in `engines`.
"""
