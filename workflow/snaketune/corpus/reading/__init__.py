"""Files and Hub datasets to raw rows, in any supported format: each row as read, or why it can't be read, with its location."""
