"""`spark.read` and `spark.readStream` of the format `exactlyonce`: exact ranges of topics as DataFrames."""
