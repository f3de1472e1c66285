"""The broker that one starts, not the one that one asks: its jars, a Java runtime, its process.

May import `pipeline` alone. `exactlyonce broker`, the demo and the tests use it; a Spark session asks it for Java.
"""
