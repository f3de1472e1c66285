"""The subcommands of `exactlyonce`, one module each: its arguments, and what it does. `starter/` is what `init` writes.

May import `cli` and everything below it; only `cli.main` imports them.
"""
