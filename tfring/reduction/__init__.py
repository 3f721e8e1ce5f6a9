"""From gradients to few collectives and back."""
