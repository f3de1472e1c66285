"""Bounded work: from a checkpoint and exact ranges to the next checkpoint, for whoever runs units (`submit`).

`unit/` is what runs in a task, `replay/` computes an interval again, `audit/` compares it with what readers see. May
import what lies directly in `engines`; never `engines.local`, nor `engines.spark` but for a repair that asks for it.
"""
