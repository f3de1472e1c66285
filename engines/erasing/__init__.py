"""The deletion of what a pipeline has in a cluster, but for its output. Imports what lies directly in `engines`."""
