"""Blocks as files: the `BlockStorage` of a folder, of HDFS and of S3. The decisions stay in the topic.

`storage` implements the seam, `writer` puts blocks, `folder` is the seam of a kind of file system, and each kind has a
module. Files lie below `<url>/<pipeline>/<id of the checkpoint topic>`: two clusters, or a pipeline before and after a
reset, share no file. Exported savepoints and the staged files of bounded work go through the same seam `folder`, and
`folder_of` makes one. `FileSink` writes to S3 and HDFS through the same classes, as a `Tree`. In the engines
`blocks.py`, `savepoints/exported.py` and `bounded/unit/locations.py` alone may import it. `connectors/files/`
reads the files of a source by it.
"""
