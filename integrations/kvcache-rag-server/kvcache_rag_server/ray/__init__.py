"""Several processes of the server: replicas of a Ray Serve deployment."""
