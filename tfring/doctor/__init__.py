"""`tfring doctor`: can this cluster train? Looks at every host and every way between ranks. Imports no TensorFlow."""
