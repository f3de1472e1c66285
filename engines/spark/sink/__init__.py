"""`df.write` and `df.writeStream` of the format `exactlyonce`: a Spark job as a checkpoint of a sink.

`driver` is the coordinator, in the driver's Python processes; `task` writes, in the executors'. May import
`engines.spark` and what lies directly in `engines`; never `engines.spark.source`.
"""
