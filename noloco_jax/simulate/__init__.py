"""The command that says which setting fits a link, and the paper's analysis in numbers. numpy only."""
