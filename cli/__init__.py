"""The `exactlyonce` command: arguments, output, and one module per subcommand in `commands/`.

May import everything but `testing`; nothing imports it.
"""
