"""PySpark as an engine for bounded work, and as a reader and writer for Spark pipelines of others.

`session` makes a session, `submit` runs units as tasks; `source/` reads the format `exactlyonce`, `sink/` writes it.
May import `engines` and `engines.bounded`; never `engines.local`.
"""
