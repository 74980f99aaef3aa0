"""Engines that train, engines that sample, and how weights go from one to the other."""
