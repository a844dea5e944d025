"""The calls of layers of a Keras model on TensorFlow: what they do, when they run, and how."""
