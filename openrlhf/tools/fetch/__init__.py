"""Small pretrained models from the package index, as Hugging Face folders."""
