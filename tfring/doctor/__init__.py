"""`tfring doctor`: can this cluster train? Checks every host and every connection. Does not import TensorFlow."""
