"""Losses of preferences: reward models, DPO and its relatives, KTO. One file for each."""
