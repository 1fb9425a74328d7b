"""A tiny model and drawn scenes to train it on, created locally: runs on a laptop CPU, downloads nothing."""
