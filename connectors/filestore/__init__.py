"""A place with files, whatever its kind: a folder of this machine or a mounted one, a prefix of S3, a folder of HDFS.

`store` has the noun, `FileStore`, and opens one by its URL; `local`, `s3` and `hdfs` implement it. Blocks, exported
savepoints, the staged files of bounded work, file sources and file sinks are kept in one. It imports no other folder of
`connectors`.
"""
