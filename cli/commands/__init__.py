"""The subcommands of `exactlyonce`, one module each: its arguments, and what it does. `starter/` is what `init` writes.

May import `cli`, its other rooms and everything below them; only `cli.main` imports them.
"""
