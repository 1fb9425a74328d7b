"""Pages about a run, made from the files in its folder: the rollout inspector and the run report. Imports no
torch."""
