"""PySpark as an engine for bounded work, and as a reader and writer for other people's Spark pipelines.

`session` makes a session, `submit` runs units as tasks; `source/` is the format `exactlyonce` to read, `sink/` to
write. May import `engines` and `engines.bounded`; never `engines.local`.
"""
