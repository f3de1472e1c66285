"""The subcommands of `exactlyonce`, one module each: its arguments, and what it does."""
