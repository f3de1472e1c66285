"""The deletion of what a pipeline has in a cluster, but for its output.

May import what lies directly in `engines`, but for the leader. Of `engines` only the leader imports this.
"""
