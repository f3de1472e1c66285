"""The audit: what each checkpoint's transactions should hold against what readers see. Writes nothing."""
