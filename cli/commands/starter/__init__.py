"""The files that `exactlyonce init` writes, as they are. They import what a user may import; nothing imports them."""
