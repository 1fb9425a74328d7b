"""Training: the Hugging Face Trainer on rows, with exact resume and a run folder that says what was run."""
