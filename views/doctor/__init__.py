"""The checks of `exactlyonce doctor`, one module for each kind; `examination` runs them all. Each only looks.

`findings` has their results. May import the rest of `views` and everything below it.
"""
