"""Requests to a service over HTTP: records wait in the checkpoint topic, and the leader sends them after the decision.

`sink` is the description. `requests` cuts staged records into requests, each with its number; `receiver` sends them;
`deliveries` is the ledger, a topic; `committer` joins the three. May import what `sinks` may import, and needs no
library beyond the standard one.
"""
