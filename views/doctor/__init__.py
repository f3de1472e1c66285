"""The checks of `exactlyonce doctor`, one module for each kind; `examination` runs them all. Each only looks.

`findings` is what they hand back, `questions` asks brokers what nobody else asks. May import the rest of `views` and
everything below it.
"""
