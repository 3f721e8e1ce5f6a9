"""`tfring bench`: how fast are collectives on this cluster, and how fast could they be? Does not import TensorFlow."""
