"""Waiting output in Kafka and in stores: found, aborted, committed by hand.

May import what lies directly in `engines`; `views` and `cli` import it.
"""
