"""Servers of stores on loopback ports, each a test's own: killed, paused, and started again on the same data.

PostgreSQL, MariaDB and Redis are the machine's programs; S3's protocol is spoken by moto, a schema registry is
Apicurio. A module imports the client of its store, and nothing of connectors and sinks but a free port. A server whose
programs are missing skips the test with what to install; where CI is set, or EXACTLYONCE_REQUIRE_STORES=1, it fails.
"""
