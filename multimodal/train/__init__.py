"""Training: data, optimisation and crash-safe state, owned by the recipes that use them."""
