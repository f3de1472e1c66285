"""The audit: what each checkpoint's transactions should hold against what readers see. Writes nothing.

May import the other folders of `engines.bounded`; only the command imports it.
"""
