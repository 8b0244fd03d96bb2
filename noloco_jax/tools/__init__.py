"""Commands beside training: a file each, or a folder for those of several parts."""
