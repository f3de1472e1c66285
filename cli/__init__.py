"""The `exactlyonce` command: arguments, what is printed, and one module per subcommand in `commands/`; in
`doctor/` the checks of one of them.

May import everything but `testing`; nothing imports it.
"""
