"""The audit: the output that each checkpoint should have against the records that readers see. Writes nothing.

May import the other folders of `engines.bounded`. Commands and `engines.spark` import it.
"""
