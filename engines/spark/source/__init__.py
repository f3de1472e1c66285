"""`spark.read` and `spark.readStream` of the format `exactlyonce`: exact ranges of topics as DataFrames, and the
state of pipelines.

May import `engines.spark`, `engines.savepoints` and what lies directly in `engines`; never `engines.spark.sink`.
"""
