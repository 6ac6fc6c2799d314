"""What answers cost on this machine: time, memory, operations, and how often chunks recur."""
