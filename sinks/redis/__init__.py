"""The Redis sink: strings, hashes or streams, written by a Lua script that keeps the ledger in the same step.

`sink` is the description, with the form of a URL, and imports no client; `rows` encodes records and groups
rows in parts, `scripts` holds the Lua, `connection` speaks to the server, `store` puts them together. May import
`write_ahead/` beside it, and what `sinks` may import; the redis library only where a connection is made.
"""
