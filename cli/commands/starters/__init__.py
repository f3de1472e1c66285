"""The files that `exactlyonce init` writes, a folder for each starter. They import only public modules; nothing imports
them."""
