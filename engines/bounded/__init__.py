"""Bounded work: from a checkpoint and exact ranges to the next checkpoint, by any runner of units (`stages.Submit`).

`unit/` runs in a task, `recompute` computes an interval again, `audit` judges readers' records by it. May import
modules directly in `engines`, `runtime/`, `savepoints/` and `external_checks/`; never `engines.local`, nor
`engines.spark` except for a repair that asks for it.
"""
