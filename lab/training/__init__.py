"""What made the data of the package, and is in no wheel."""
