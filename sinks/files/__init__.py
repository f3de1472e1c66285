"""Files in a folder as a sink: Parquet and JSON lines, staged beside the target and published by rename.

At a barrier the files of an interval are closed and durable in a hidden folder of the target; the committable names the
list of them. Once the checkpoint is decided, the leader renames them to their places, never onto a name that exists,
and writes the ledger entry. May import what `sinks` may import; only `parquet` imports pyarrow.
"""
