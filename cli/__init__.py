"""The `exactlyonce` command."""
