"""Pages a person looks at, from what a run wrote: the rollout inspector and the run report. Imports no torch."""
