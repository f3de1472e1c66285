"""The engines, and what all of them share: the plan, storages, the leader with its connections.

- `runtime/` runs one subtask: its operators, their assembly, the cut of a snapshot.
- `local/` runs workers with barriers; `spark/` runs bounded work at scale. Both may import `bounded/`, which knows
  neither. All may import the modules here, which import `runtime/` and `external_checks/` alone, but for
  `pipeline_connections`: it makes the replay repair, of `bounded/`, and restores savepoints.
- `external_checks/` looks at the topics and stores of a pipeline.
- `savepoints/` exports and restores savepoints.
"""
