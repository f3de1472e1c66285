"""The checks of `exactlyonce doctor`; `examination` runs them all. Each only looks.

`findings` has their results, and the pipeline that is examined. May import the rest of `views` and everything below it.
"""
