"""The `exactlyonce` command: arguments, what is printed, and one module per subcommand in `commands/`. In `doctor/` are
the checks of one of them, in `transactions/` what another shows and ends.

May import everything but `testing`; nothing imports it.
"""
