"""The embedded broker: its jars, its process, and the programs that these need: a Java runtime, child processes.

May import `pipeline` and `connectors.confluent`. `exactlyonce broker`, the demo and the tests use it; a Spark session
uses its Java.
"""
