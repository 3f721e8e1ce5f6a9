"""`tfring report`: what the ranks of a run did and when, and who waits for whom. Does not import TensorFlow."""
