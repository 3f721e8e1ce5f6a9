"""`tfring launch`: starts the workers of a job, shows what they print, stops them. Imports no TensorFlow."""
