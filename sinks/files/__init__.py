"""Files in a folder, in HDFS or in S3 as a sink: Parquet, Avro and JSON lines, staged and then published at once.

At a barrier the files of an interval are closed and durable where no reader looks; the committable names the list of
them. Once the checkpoint is decided, the leader gives them their names, never one that exists, and writes the ledger
entry. `place` has both in a `FileStore`. May import what `sinks` may import; only `parquet` needs pyarrow.
"""
