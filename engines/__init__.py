"""The engines, and what all of them share: the plan, storages, the leader with its connections.

`runtime/` runs one subtask, whoever runs it: its operators, their assembly, the cut of a snapshot.

`local/` runs workers with barriers, `spark/` runs bounded work at scale; both may import `bounded/`, which knows
neither. All of them may import what lies directly here, which imports none of them, but for the replay repair. What a
pipeline reads and writes, topics and stores, is looked at in `surroundings/`; in `savepoints/`, savepoints are exported
and restored; in `erasing/` all that a pipeline has in a cluster is deleted; in `ending/` output that waits is found,
and ended by hand.
"""
