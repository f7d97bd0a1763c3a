"""Work of the models for clients: a thread each, and jobs of each kind."""
