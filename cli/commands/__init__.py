"""The subcommands of `exactlyonce`, one module each. `starters/` has the files that `init` writes.

May import `cli` and everything below it; only `cli.main` imports them.
"""
