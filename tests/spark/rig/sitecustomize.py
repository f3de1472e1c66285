"""Spark's Python processes import PySpark as it is installed.

Spark puts a zip of it before all else, which each process compiles anew. On a busy machine a source of a stream needed
more than the 10 s for that which Spark gives its process to answer.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
