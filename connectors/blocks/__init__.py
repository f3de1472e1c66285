"""Blocks as files: the `BlockStorage` of a folder, of HDFS and of S3. The decisions stay in the topic.

`storage` has the seam's side, `writer` puts, `folder` says what a kind of file system gives, and each kind has a
module. Names begin below `<url>/<pipeline>/<id of the checkpoint topic>`: two clusters, or two lives of one pipeline
with a reset between them, share no file. May be imported by `engines/blocks.py` alone.
"""
