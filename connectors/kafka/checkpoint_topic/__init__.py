"""The checkpoint topic in a real cluster: its settings, the decision log, blocks, and the mailbox of a pipeline.

`log_requests` writes decisions, `log_reader` reads them, `blocks` is the `BlockStorage` of the other partitions, `scan`
reads ranges of both. May import the modules of `connectors.kafka`, `checkpoint` and `pipeline`.
"""
