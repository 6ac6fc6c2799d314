"""Put cached chunks together into one prompt: find, load or compute them, and rotate their keys."""
