"""`spark.read` and `spark.readStream` of the format `exactlyonce`: exact ranges of topics as DataFrames.

May import `engines.spark` and what lies directly in `engines`; never `engines.spark.sink`.
"""
