"""Real sparse compute for TensorFlow on CPU: custom ops built on first use, and what swaps them into a model."""
