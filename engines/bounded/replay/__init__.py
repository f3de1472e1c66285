"""Replays: the output of an interval computed again from the checkpoint before it, along its order logs."""
