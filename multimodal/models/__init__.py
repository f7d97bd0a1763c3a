"""Models: a stem and a stack each. No model knows a checkpoint family's name."""
