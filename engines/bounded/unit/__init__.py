"""A unit of bounded work: one subtask of one task, what it reads, runs, stages and publishes, in whatever process."""
