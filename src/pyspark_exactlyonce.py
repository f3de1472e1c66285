"""The format `exactlyonce` for sessions that have not called `register`: Spark looks for modules of this prefix."""

from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource as DefaultSource

__all__ = ["DefaultSource"]
