"""Read models: plain data about a pipeline for commands, pages and programs. Nothing here changes anything.

`doctor/` finds faults around a pipeline. May import `engines` and everything below it; `cli` imports it.
"""
