"""Read models: what commands, pages and programs show of a pipeline, as plain data. Nothing here changes anything.

`doctor/` finds what is wrong around a pipeline. May import `engines` and everything below it; `cli` imports it.
"""
