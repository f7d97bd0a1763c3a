"""The Hugging Face hub: good models by name, downloads and the local cache."""
