"""The output that waits: transactions that are open, what is set aside for stores, and how both are ended by hand.

`waiting` is what is shown of either, `open_transactions` and `staged_output` find them, `committing` and `aborting` end
them. May import `cli` and everything below it; `cli/commands` and `cli/doctor` import it.
"""
