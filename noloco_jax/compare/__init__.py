"""The same model trained with several methods: which runs, their results, the table and the picture."""
