"""Commands about the installation, and the server."""
