"""Blocks as files: the `BlockStorage` of a folder, of HDFS and of S3. The decisions stay in the topic.

`storage` implements the seam, `writer` puts blocks, `folder` is the seam of a kind of file system, and each kind has a
module. Files lie below `<url>/<pipeline>/<id of the checkpoint topic>`: two clusters, or a pipeline before and after a
reset, share no file. `engines/blocks.py` alone may import it.
"""
