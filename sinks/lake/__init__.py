"""Tables of a lake as sinks, whatever the format: Parquet files that a commit makes part of the table.

At a barrier the files of an interval are durable, and no snapshot of the table has them; the committable says where
they are listed. Once the checkpoint is decided, the leader adds the files of all subtasks in one commit of the table,
with the ledger in the same commit. `table` is the seam to a format. May import what `sinks` may import, from
`files` the columns, Parquet and layout, and from `sql` the checks of a description.
"""
