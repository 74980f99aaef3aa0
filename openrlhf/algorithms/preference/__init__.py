"""Preference losses: reward models, DPO and its variants, KTO; one file per loss."""
