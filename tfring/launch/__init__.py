"""`tfring launch`: starts the workers of a job, shows their output, stops them. Does not import TensorFlow."""
