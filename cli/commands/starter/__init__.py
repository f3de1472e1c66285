"""The files that `exactlyonce init` writes. They import only public modules; nothing imports them."""
