"""What Keras and TensorFlow write, in a run of several workers: once, by the chief, and whole or not at all."""
