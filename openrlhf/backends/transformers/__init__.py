"""Sampling by transformers alone, one request at a time."""
