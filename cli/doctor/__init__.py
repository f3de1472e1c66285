"""The checks of `exactlyonce doctor`, one module for each kind; `examination` runs them all. Each only looks.

`findings` is what they hand back, `questions` what they ask brokers that nobody else does. May import `cli` and
everything below it; `cli/commands` import it.
"""
