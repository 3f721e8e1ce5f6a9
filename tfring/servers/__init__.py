"""Parameter servers: what they hold, how workers reach them, and which gradients make an update."""
