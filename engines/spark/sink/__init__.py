"""`df.write` and `df.writeStream` of the format `exactlyonce`: a Spark job as a checkpoint of a sink.

`driver` is the coordinator, in the driver's Python processes; `task` writes to Kafka, `store_task` to the store that
`target` describes, in the executors'. May import `engines.spark`, `engines.surroundings` and what lies directly in
`engines`; never `engines.spark.source`.
"""
