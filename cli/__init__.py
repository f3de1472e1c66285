"""The `exactlyonce` command: arguments, output, one module per subcommand in `commands/`, the parts of one in `demo/`.

May import everything but `testing`; nothing imports it.
"""
