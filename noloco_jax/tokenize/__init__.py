"""Tokenization of texts to Parquet files."""
