"""How the packaged reader was trained, from nothing, on CPU: `python -m training.reader.train`."""
