"""The commit of pre-committed output for each family of sinks: `kafka`, and `stores` for any with a ledger. Pure.

The seam that a leader sees is `decision.CommitProtocol`. May import `decision`, and what that may.
"""
