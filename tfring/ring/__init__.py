"""The ring engine: membership, collectives, TensorFlow ops."""
