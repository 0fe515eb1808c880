"""What is known to go wrong with a run, found before it costs money."""
