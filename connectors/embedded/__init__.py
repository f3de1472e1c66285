"""The embedded broker: its jars, a Java runtime, its process.

May import `pipeline` alone. `exactlyonce broker`, the demo and the tests use it; a Spark session uses its Java.
"""
