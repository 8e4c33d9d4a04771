"""Training objectives: pure functions on tensors."""
