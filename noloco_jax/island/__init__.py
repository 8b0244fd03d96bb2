"""Commands of islands: `mode` trains one, `peers` makes keys and asks for status, `models` merges and converts runs."""
