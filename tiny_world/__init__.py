"""A tiny invented world for the offline demo: its text, its instruction rows and a small base model."""
