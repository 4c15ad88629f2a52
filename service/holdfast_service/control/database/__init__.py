"""The SQL engine, the schema, its migrations, and which rows a caller sees."""
