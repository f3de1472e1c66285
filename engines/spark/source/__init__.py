"""`spark.read` and `spark.readStream` of the format `exactlyonce`: exact ranges of topics, and the state of pipelines.

May import `engines.spark`, `engines.bounded`, `engines.savepoints` and modules directly in `engines`; never
`engines.spark.sink`.
"""
