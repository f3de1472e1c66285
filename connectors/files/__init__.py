"""Files as a source: `source` describes it, `finding` numbers the files of a folder, `formats` reads one of them.

A folder may be read by anyone while it is written to; a file may not change once it has appeared. May import
`connectors.splits`, `connectors.source` and `connectors.filestore`.
"""
