"""The checks of `exactlyonce doctor`, one module for each kind; `examination` runs them all. Each only looks.

`findings` is what they hand back, `questions` what they ask brokers that nobody else does. May import `cli`,
`cli/transactions` and everything below them; `cli/commands` import it.
"""
