"""Pack examples into rows, and compute the loss from the logits at supervised positions, exactly as the pipeline
declares it. All modules but `carry` import torch."""
