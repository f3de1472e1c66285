"""Read models: what commands, pages and programs show of a pipeline, as plain data. Nothing here changes anything.

May import `engines` and everything below it; `cli` imports it.
"""
