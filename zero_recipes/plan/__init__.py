"""What every strategy will need, before a GPU is rented: memory by the real engine, verdicts, cures, time and cost."""
