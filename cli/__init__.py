"""The `exactlyonce` command: arguments, what is printed, and one module per subcommand in `commands/`.

May import everything but `testing`; nothing imports it.
"""
