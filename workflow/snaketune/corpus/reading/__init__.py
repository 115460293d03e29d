"""Files and Hub datasets to raw rows, whatever their format: each row as it was found, or why there is none, and where."""
