"""Blocks as files of a `FileStore`: the `BlockStorage` of a folder, of HDFS and of S3. The decisions stay in the topic.

`storage` implements the seam, `writer` puts blocks, `names` are the names of their files. These lie below
`<url>/<pipeline>/<id of the checkpoint topic>`: two clusters, or a pipeline before and after a reset, share no file. In
the engines `blocks.py` alone may import it.
"""
