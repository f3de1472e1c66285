"""`df.write` and `df.writeStream` of the format `exactlyonce`: a Spark job as a checkpoint of a sink.

`driver` is the coordinator, in the driver's Python processes; `task` writes, in the executors'.
"""
