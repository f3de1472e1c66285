"""`df.write` and `df.writeStream` of the format `exactlyonce`: a Spark job as a checkpoint of a sink.

`driver` is the coordinator, in the driver's Python processes; in the executors' processes, `task` writes to Kafka or to
the store that `target` describes. May import `engines.spark`, `engines.external_checks` and modules
directly in `engines`; never `engines.spark.source`.
"""
