"""What `exactlyonce init` writes: each file beside this one, as it is."""
