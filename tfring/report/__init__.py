"""`tfring report`: what the ranks of a run did when, and who waits for whom. Imports no TensorFlow."""
