"""The atlas: plans of many models on many GPUs in one page, which needs no network and no other file."""
